#include <roundpipe/runtime/model_planner.h>

#include <algorithm>
#include <cmath>

namespace roundpipe::runtime {

using schedule::Phase;
using schedule::Plan;
using schedule::PlanMode;
using schedule::Range;

namespace {

// Until times are measured, a layer's cost is estimated from the size of its weights, with a lower bound.
constexpr double kBytesPerMs = 1e6;
constexpr double kLeast_ms = 0.01;
// The weight of a new measurement. The second one replaces the first, which includes one-time work and choices.
double weight_of_new(int calls) { return calls < 2 ? 1 : 0.3; }

constexpr int kCallsToMeasure = 2;
constexpr int kCallsBetweenPlans = 8;
constexpr double kDrift = 0.2;
constexpr size_t kMostPlans = 16;

double median(std::vector<double>& values) {
  // The shorter of two: a job's first microbatch may include waiting.
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>((values.size() - 1) / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The share of a step's work that has moved between layers.
double drift(const schedule::LayerCosts& before, const schedule::LayerCosts& now) {
  double moved_ms = 0, total_ms = 0;
  for (size_t l = 0; l < now.size(); ++l) {
    const double was_ms = before[l].forward_ms + before[l].backward_ms;
    const double is_ms = now[l].forward_ms + now[l].backward_ms;
    moved_ms += std::abs(is_ms - was_ms);
    total_ms += was_ms;
  }
  return total_ms > 0 ? moved_ms / total_ms : 0;
}

}  // namespace

CostMeter::CostMeter(const ModelState& model) : model_(model) {
  for (int l = 0; l < model.layer_count(); ++l) {
    weight_bytes_.push_back(lay_out_stage(model, l, l + 1).size_bytes);
    const double guess_ms = std::max(kLeast_ms, static_cast<double>(weight_bytes_.back()) / kBytesPerMs);
    layers_.push_back({guess_ms, 2 * guess_ms});
  }
}

double CostMeter::forward_ms(Range layers) const {
  double total = 0;
  for (int l = layers.first; l < layers.last; ++l) total += layers_[static_cast<size_t>(l)].forward_ms;
  return total;
}

void CostMeter::add(const std::vector<ExecutionRecord>& records) {
  std::map<std::tuple<Phase, int, int>, std::vector<double>> times;
  for (const ExecutionRecord& record : records) {
    const double busy_ms = record.end_ms - record.start_ms - record.waited_ms;
    times[{record.phase, record.layers.first, record.layers.last}].push_back(busy_ms);
  }
  for (size_t l = 0; l < layers_.size(); ++l) {
    Layer& layer = layers_[l];
    const auto take = [](double clocked_ms, double& known_ms, int& calls) {
      known_ms += weight_of_new(calls) * (clocked_ms - known_ms);
      ++calls;
    };
    const double forward_ms = model_.layers[l]->forward_ms.load();
    if (forward_ms > 0) {
      take(forward_ms, layer.forward_ms, layer.forward_calls);
      if (layer.backward_calls == 0) layer.backward_ms = 2 * layer.forward_ms;
    }
    const double backward_ms = model_.layers[l]->backward_ms.exchange(0);
    if (backward_ms > 0) {
      take(backward_ms, layer.backward_ms, layer.backward_calls);
      layer.backward_clocked = true;
    }
  }
  const bool clocked = model_.layers.front()->forward_ms.load() > 0;
  // Forwards first: the time of a backward includes the forward that it recomputes.
  for (const bool forward : {true, false}) {
    for (auto& [stage, values] : times) {
      const auto [phase, first_layer, end] = stage;
      const schedule::Range layers{first_layer, end};
      if ((phase == Phase::kForward) != forward) continue;
      const double measured_ms = std::max(kLeast_ms, median(values));
      const auto scale = [&](double Layer::* field, int Layer::* calls, double thought_ms, double target_ms) {
        const double factor = thought_ms > 0 ? target_ms / thought_ms : 1;
        for (int l = layers.first; l < layers.last; ++l) {
          Layer& layer = layers_[static_cast<size_t>(l)];
          layer.*field *= 1 + weight_of_new(layer.*calls) * (factor - 1);
          ++(layer.*calls);
        }
      };
      const double thought_ms = forward_ms(layers);
      if (forward && clocked) continue;
      if (forward) {
        scale(&Layer::forward_ms, &Layer::forward_calls, thought_ms, measured_ms);
        continue;
      }
      double backward_ms = 0;
      bool forward_known = true, backward_clocked = true;
      for (int l = layers.first; l < layers.last; ++l) {
        backward_ms += layers_[static_cast<size_t>(l)].backward_ms;
        forward_known &= layers_[static_cast<size_t>(l)].forward_calls > 0;
        backward_clocked &= layers_[static_cast<size_t>(l)].backward_clocked;
      }
      if (clocked && backward_clocked) continue;
      if (!forward_known || (phase == Phase::kFused && !clocked)) {
        // Only measured together: divided in the usual ratio.
        if (!clocked) scale(&Layer::forward_ms, &Layer::forward_calls, thought_ms, measured_ms / 3);
        scale(&Layer::backward_ms, &Layer::backward_calls, backward_ms, measured_ms * 2 / 3);
      } else {
        scale(&Layer::backward_ms, &Layer::backward_calls, backward_ms,
              std::max(measured_ms - thought_ms, measured_ms / 10));
      }
    }
  }
}

bool CostMeter::knows(bool backward, int calls) const {
  return std::all_of(layers_.begin(), layers_.end(), [&](const Layer& layer) {
    return layer.forward_calls >= calls && (!backward || layer.backward_calls >= calls);
  });
}

void CostMeter::set_bytes(std::vector<int64_t> saved_bytes, std::vector<int64_t> activation_bytes) {
  saved_bytes_ = std::move(saved_bytes);
  activation_bytes_ = std::move(activation_bytes);
}

schedule::LayerCosts CostMeter::costs() const {
  schedule::LayerCosts costs;
  for (size_t l = 0; l < layers_.size(); ++l) {
    schedule::LayerCost cost;
    cost.forward_ms = layers_[l].forward_ms;
    cost.backward_ms = layers_[l].backward_ms;
    cost.weight_bytes = weight_bytes_[l];
    if (!saved_bytes_.empty()) {
      cost.saved_bytes = saved_bytes_[l];
      cost.activation_bytes = activation_bytes_[l];
      for (const size_t block : model_.layers[l]->blocks) {
        if (model_.blocks[block].trainable()) cost.gradient_bytes += model_.blocks[block].block->layout().size_bytes;
      }
    }
    costs.push_back(cost);
  }
  return costs;
}

int64_t stage_share_bytes(Engine& engine, const schedule::LayerCosts& costs, int64_t limit_bytes) {
  constexpr int64_t kStageShare = 6;
  int64_t share_bytes = limit_bytes;
  for (int i = 0; i < engine.size(); ++i) {
    const int64_t bytes = engine.worker(i).device().memory_limit_bytes() / kStageShare;
    if (bytes > 0 && (share_bytes == 0 || bytes < share_bytes)) share_bytes = bytes;
  }
  if (share_bytes == 0) return 0;
  for (const schedule::LayerCost& cost : costs) share_bytes = std::max(share_bytes, cost.weight_bytes);
  return share_bytes;
}

void ModelPlanner::set_bytes(std::vector<int64_t> saved_bytes, std::vector<int64_t> activation_bytes,
                             int64_t most_stage_bytes) {
  meter_.set_bytes(std::move(saved_bytes), std::move(activation_bytes));
  most_stage_bytes_ = most_stage_bytes;
  current_.clear();
}

int64_t ModelPlanner::stage_bytes(Engine& engine, const schedule::LayerCosts& costs) const {
  if (most_stage_bytes_ < 0) return stage_share_bytes(engine, costs);
  int64_t most_bytes = most_stage_bytes_;
  // The largest layer by itself is tried in any case: only the device can tell whether it fits.
  for (const schedule::LayerCost& cost : costs) {
    if (most_bytes > 0) most_bytes = std::max(most_bytes, cost.weight_bytes + cost.gradient_bytes + cost.saved_bytes);
  }
  return most_bytes;
}

Plan ModelPlanner::recipe(Engine& engine, const Key& key, bool measured) const {
  schedule::LayerCosts costs = meter_.costs();
  schedule::SearchOptions options;
  options.plan.mode = key.mode;
  options.plan.microbatches = key.microbatches;
  options.plan.first_backward_layer = key.first_backward_layer;
  const int64_t share_bytes = stage_bytes(engine, costs);
  for (schedule::LayerCost& cost : costs) {
    if (most_stage_bytes_ < 0) break;
    // Forward stages keep to the same cap, since their weights lie in memory beside the values of a backward stage.
    cost.weight_bytes += cost.gradient_bytes + cost.saved_bytes;
    cost.gradient_bytes = cost.saved_bytes = 0;
  }
  options.plan.max_stage_bytes = share_bytes;
  const schedule::CostSums sums(costs, key.first_backward_layer);
  const schedule::Stages simple = schedule::choose_stages(costs, key.devices, options.plan);
  if (!measured) return schedule::to_recipe(schedule::to_cut(simple), sums, key.devices, options.plan);
  schedule::Cluster cluster;
  // The bytes of a visit as the search computes them; each layer by itself must be possible.
  int64_t room_bytes = 2 * share_bytes;
  for (int l = 0; share_bytes > 0 && l < static_cast<int>(costs.size()); ++l) {
    room_bytes = std::max(room_bytes, sums.visit_bytes({l, l + 1}, key.mode != PlanMode::kInference, /*least=*/false));
  }
  for (int i = 0; i < key.devices; ++i) cluster.devices.push_back({1, room_bytes});
  options.rules.asynchronous = key.asynchronous;
  // Every value goes by way of the host.
  options.rules.hop_on_same_device = true;
  options.replicas = false;
  // A call is submitted when much of the previous one has begun, too late for a plan that puts its jobs before those.
  options.interleave = false;
  options.max_fused_layers = static_cast<int>(costs.size());
  if (share_bytes > 0 && key.mode == PlanMode::kFused) options.max_fused_layers = simple.backward.front().size();
  return schedule::search(costs, cluster, options).front().recipe;
}

schedule::Placer ModelPlanner::placer(Engine& engine, const Key& key, bool measured) const {
  schedule::Cluster cluster;
  cluster.devices.resize(static_cast<size_t>(key.devices));
  schedule::TimingRules rules;
  rules.asynchronous = key.asynchronous;
  rules.hop_on_same_device = true;
  return schedule::Placer(recipe(engine, key, measured), meter_.costs(), cluster, rules);
}

std::vector<Plan> ModelPlanner::preview(Engine& engine, PlanMode mode, int microbatches, int first_backward_layer,
                                        int steps) const {
  const Key key{mode, microbatches, first_backward_layer, engine.size(), asynchronous_};
  const auto found = current_.find(key);
  const bool known = meter_.knows(mode != PlanMode::kInference && first_backward_layer == 0, kCallsToMeasure);
  schedule::Placer next =
      found != current_.end() && found->second.placer ? *found->second.placer : placer(engine, key, known);
  std::vector<Plan> plans;
  for (int step = 0; step < steps; ++step) plans.push_back(next.next());
  return plans;
}

Plan ModelPlanner::next(Engine& engine, PlanMode mode, int microbatches, int first_backward_layer) {
  const Key key{mode, microbatches, first_backward_layer, engine.size(), asynchronous_};
  if (current_.size() >= kMostPlans && !current_.contains(key)) current_.clear();
  Current& current = current_[key];
  const bool known = meter_.knows(mode != PlanMode::kInference && first_backward_layer == 0, kCallsToMeasure);
  const bool drifted =
      current.measured && current.calls >= kCallsBetweenPlans && drift(current.costs, meter_.costs()) > kDrift;
  if (!current.placer || (known && !current.measured) || drifted) {
    current.placer.emplace(placer(engine, key, known));
    current.costs = meter_.costs();
    current.measured = known;
    current.calls = 0;
  }
  ++current.calls;
  return current.placer->next();
}

schedule::Stages ModelPlanner::stages(Engine& engine, PlanMode mode, int microbatches) const {
  const Key key{mode, microbatches, 0, engine.size(), asynchronous_};
  const Plan made = recipe(engine, key, meter_.knows(mode != PlanMode::kInference, kCallsToMeasure));
  schedule::Stages stages{made.forward_stages(), {}};
  if (mode != PlanMode::kInference) stages.backward = made.backward_stages();
  return stages;
}

schedule::Stages ModelPlanner::balanced_stages(Engine& engine, PlanMode mode, int min_stages, double upper_threshold,
                                               int64_t memory_limit_bytes) const {
  const schedule::LayerCosts costs = meter_.costs();
  schedule::PlannerOptions options;
  options.mode = mode;
  options.microbatches = 1;
  options.min_stages = min_stages;
  options.upper_threshold = upper_threshold;
  options.max_stage_bytes = stage_share_bytes(engine, costs, memory_limit_bytes);
  return schedule::choose_stages(costs, engine.size(), options);
}

}  // namespace roundpipe::runtime
