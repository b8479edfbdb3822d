#include <roundpipe/runtime/model_planner.h>

#include <cmath>
#include <utility>

#include <roundpipe/core/memory_rules.h>
#include <roundpipe/core/residency.h>
#include <roundpipe/memory/host_room.h>
#include <roundpipe/runtime/model/layer_sizes.h>
#include <roundpipe/schedule/moved_bytes.h>
#include <roundpipe/schedule/progress.h>
#include <roundpipe/simulate/link_search.h>

namespace roundpipe::runtime {

using schedule::Cluster;
using schedule::CutStage;
using schedule::LayerCost;
using schedule::LayerCosts;
using schedule::Phase;
using schedule::Plan;
using schedule::PlanMode;
using schedule::Range;

namespace {

constexpr int kCallsToMeasure = 2;
constexpr int kCallsBetweenPlans = 8;
constexpr int kCallsBetweenSearches = 4, kMostSearches = 3;
constexpr double kDrift = 0.2;
// A search takes about as long as a step: a better plan for a short one would not pay for it. Of a step's time on the
// devices; at least kLeastEffort, at most the default effort.
constexpr double kEffortPerMs = 500'000;
constexpr double kLeastEffort = 20'000'000;
constexpr std::int64_t kLittleEffort = 2'000'000;
constexpr size_t kMostPlans = 16;
constexpr size_t kMostSteps = 32;
constexpr size_t kMostOfShare = 16;
// Transfers matter if they take this share of a step's compute, however they are spread.
constexpr double kLinksMatter = 0.02;
constexpr double kEqualLayers = 0.1;  // layers of one size whose times differ by less are equal
constexpr double kEarly = 0.5;        // steps may overlap if a larger share of calls comes early

// The share of a step's work that has moved between layers.
double drift(const LayerCosts& before, const LayerCosts& now) {
  double moved_ms = 0, total_ms = 0;
  for (size_t l = 0; l < now.size(); ++l) {
    const double was_ms = before[l].forward_ms + before[l].backward_ms;
    const double is_ms = now[l].forward_ms + now[l].backward_ms;
    moved_ms += std::abs(is_ms - was_ms);
    total_ms += was_ms;
  }
  return total_ms > 0 ? moved_ms / total_ms : 0;
}

bool has_drifted(double before, double now) { return std::abs(now - before) > kDrift * std::max(before, now); }

bool has_drifted(const MeasuredMachine& before, const MeasuredMachine& now) {
  for (size_t i = 0; i < now.cluster.devices.size(); ++i) {
    if (has_drifted(before.cluster.devices[i].speed, now.cluster.devices[i].speed)) return true;
  }
  return has_drifted(before.cluster.link_up_gb_per_s, now.cluster.link_up_gb_per_s) ||
         has_drifted(before.cluster.link_down_gb_per_s, now.cluster.link_down_gb_per_s) ||
         has_drifted(before.cluster.host_gb_per_s, now.cluster.host_gb_per_s) ||
         has_drifted(before.update_gb_per_s, now.update_gb_per_s);
}

// The engine's rules: every value goes by way of the host.
schedule::TimingRules rules_of(bool asynchronous) {
  schedule::TimingRules rules;
  rules.asynchronous = asynchronous;
  rules.hop_on_same_device = true;
  return rules;
}

// The part of a device's memory that the weights of one stage may take; 0 = no limit.
int64_t device_share_bytes(const device::Device& device) {
  constexpr int64_t kStageShare = 6;
  return device.memory_limit_bytes() / kStageShare;
}

int64_t bytes_of(const std::vector<int64_t>& held_bytes, Range layers) {
  int64_t bytes = 0;
  for (int l = layers.first; l < layers.last; ++l) bytes += held_bytes[static_cast<size_t>(l)];
  return bytes;
}

// Forward stages that hold at most `most_bytes`, or one layer: longer ones are halved.
std::vector<CutStage> halved(const std::vector<CutStage>& stages, const std::vector<int64_t>& held_bytes,
                             int64_t most_bytes) {
  std::vector<CutStage> result;
  std::vector<CutStage> left(stages.rbegin(), stages.rend());
  while (!left.empty()) {
    const CutStage stage = left.back();
    left.pop_back();
    const auto [first, last] = stage.layers;
    if (last - first == 1 || bytes_of(held_bytes, stage.layers) <= most_bytes) {
      result.push_back(stage);
      continue;
    }
    const int middle = (first + last) / 2;
    left.push_back({{middle, last}, stage.replicas});
    left.push_back({{first, middle}, stage.replicas});
  }
  return result;
}

// The step that a finished training call made; empty for other calls.
std::optional<MeasuredStep> step_of(const std::vector<ExecutionRecord>& records) {
  MeasuredStep step;
  bool trains = false;
  for (const ExecutionRecord& record : records) {
    trains |= record.phase != Phase::kForward;
    step.microbatches = std::max(step.microbatches, record.microbatch + 1);
    step.start_ms = step.busy_ms > 0 ? std::min(step.start_ms, record.start_ms) : record.start_ms;
    step.end_ms = std::max(step.end_ms, record.end_ms);
    step.busy_ms += record.busy_ms();
  }
  return trains ? std::optional(step) : std::nullopt;
}

}  // namespace

schedule::PlannerOptions options_of(const PlanRequest& request) {
  schedule::PlannerOptions options;
  options.mode = request.mode;
  options.microbatches = request.microbatches;
  options.gradient_groups = request.gradient_groups;
  options.first_backward_layer = request.first_backward_layer;
  options.single_backward_layers = request.recompute_grain == RecomputeGrain::kLayer;
  return options;
}

std::vector<char> trained_layers(const std::vector<std::vector<char>>& trainable) {
  std::vector<char> trained;
  for (const std::vector<char>& layer : trainable) trained.push_back(std::ranges::count(layer, 1) > 0 ? 1 : 0);
  return trained;
}

int64_t stage_share_bytes(Engine& engine, const LayerCosts& costs, int64_t limit_bytes) {
  int64_t share_bytes = limit_bytes;
  for (int i = 0; i < engine.size(); ++i) {
    const int64_t bytes = device_share_bytes(engine.worker(i).device());
    if (bytes > 0 && (share_bytes == 0 || bytes < share_bytes)) share_bytes = bytes;
  }
  if (share_bytes == 0) return 0;
  for (const LayerCost& cost : costs) share_bytes = std::max(share_bytes, cost.weight_bytes);
  return share_bytes;
}

void ModelPlanner::observe(const ExecutionLog& log) {
  const std::vector<ExecutionRecord> records = log.records();
  meter_.add(records, log.layer_times());
  if (std::optional<MeasuredStep> step = step_of(records)) {
    steps_.push_back(*step);
    if (steps_.size() > kMostSteps) steps_.erase(steps_.begin());
  }
}

void ModelPlanner::forget_devices() {
  meter_.forget_devices();
  current_.clear();
  steps_.clear();
  early_share_ = 0;
}

void ModelPlanner::set_bytes(std::vector<int64_t> saved_bytes, std::vector<int64_t> activation_bytes,
                             int64_t most_stage_bytes, int fused_layers) {
  meter_.set_bytes(std::move(saved_bytes), std::move(activation_bytes));
  most_stage_bytes_ = most_stage_bytes;
  fused_layers_ = fused_layers;
  longer_ = {};
  fits_ = {};
  current_.clear();
}

std::optional<double> ModelPlanner::busy_share(int devices) const {
  std::vector<double> shares;
  const size_t first = std::max(steps_.size(), kMostOfShare + 1) - kMostOfShare;
  for (size_t i = first; i < steps_.size(); ++i) {
    const double length_ms = steps_[i].end_ms - steps_[i - 1].end_ms;
    if (length_ms > 0) shares.push_back(steps_[i].busy_ms / length_ms);
  }
  if (shares.empty()) return std::nullopt;
  std::ranges::sort(shares);
  const double median = (shares[(shares.size() - 1) / 2] + shares[shares.size() / 2]) / 2;
  return std::min(1.0, median / devices);
}

bool ModelPlanner::knows_costs() const { return meter_.knows(/*backward=*/true, kCallsToMeasure); }

int64_t ModelPlanner::resident_room_bytes(const device::Device& device) const {
  const int64_t cap_bytes = device.memory_limit_bytes();
  if (cap_bytes == 0) return 0;
  const int64_t known_bytes = model_.work_bytes.load();
  const auto work_bytes =
      known_bytes > 0 ? known_bytes : static_cast<int64_t>(static_cast<double>(cap_bytes) * kActivationShare);
  int64_t largest_bytes = 0;
  for (int l = 0; l < model_.layer_count(); ++l)
    largest_bytes = std::max(largest_bytes, lay_out_stage(model_, l, l + 1).size_bytes);
  const int64_t most_bytes = device.most_resident_bytes();
  const int64_t room_bytes = bytes_for_weights({cap_bytes, work_bytes}) - 2 * largest_bytes;
  return std::max<int64_t>(0, most_bytes >= 0 ? std::min(room_bytes, most_bytes) : room_bytes);
}

MeasuredMachine ModelPlanner::machine(Engine& engine, int devices) const {
  const MachineRates rates = engine.meter().rates();
  MeasuredMachine machine;
  const std::vector<double> speeds = meter_.speeds(devices);
  for (int i = 0; i < devices; ++i) {
    const device::Device& device = engine.worker(i).device();
    machine.cluster.devices.push_back(
        {speeds[static_cast<size_t>(i)], device.memory_limit_bytes(), resident_room_bytes(device)});
  }
  machine.cluster.link_up_gb_per_s = rates.up_gb_per_s();
  machine.cluster.link_down_gb_per_s = rates.down_gb_per_s();
  machine.cluster.host_gb_per_s = rates.host_gb_per_s;
  machine.cluster.hop_latency_ms = rates.hop_latency_ms;
  machine.links = rates.links;
  machine.update_gb_per_s = model_.updates.gb_per_s();
  bool all_cut = true;
  for (int i = 0; i < devices; ++i) {
    const device::LinkOptions& link = engine.worker(i).device().link_options();
    all_cut &= link.chunk_bytes > 0;
    machine.chunk_bytes = std::max(machine.chunk_bytes, link.chunk_bytes);
    machine.priorities &= !link.first_come;
  }
  if (!all_cut) machine.chunk_bytes = 0;
  return machine;
}

ModelPlanner::Key ModelPlanner::key_of(Engine& engine, PlanRequest request) const {
  return {std::move(request), engine.size(), asynchronous_};
}

PlanRequest ModelPlanner::request_of(PlanMode mode, int microbatches) const {
  PlanRequest request;
  request.mode = mode;
  request.microbatches = microbatches;
  request.trained = trained_layers(model_.trainable());
  return request;
}

ModelPlanner::Basis ModelPlanner::basis(Engine& engine, const Key& key) const {
  const PlanRequest& request = key.request;
  const bool backward = request.mode != PlanMode::kInference && request.first_backward_layer == 0;
  Basis basis;
  basis.costs = meter_.costs();
  schedule::average_alike(basis.costs, kEqualLayers);
  for (size_t l = 0; l < basis.costs.size(); ++l) basis.costs[l].trained = request.trained[l] != 0;
  const std::vector<simulate::LayerBytes> sizes = layer_sizes(model_);
  for (size_t l = 0; l < sizes.size(); ++l) {
    for (const FrozenBlock& block : sizes[l].frozen) basis.costs[l].frozen_bytes += block.bytes;
  }
  basis.machine = machine(engine, key.devices);
  basis.measured = meter_.knows(backward, kCallsToMeasure);
  basis.early = key.asynchronous && early_share_ > kEarly;
  return basis;
}

ModelPlanner::Room ModelPlanner::room(Engine& engine, const LayerCosts& costs, int devices) const {
  const bool known = most_stage_bytes_ >= 0;
  Room room;
  for (const LayerCost& cost : costs)
    room.held_bytes.push_back(cost.weight_bytes + (known ? cost.gradient_bytes + cost.saved_bytes : 0));
  const int64_t largest_bytes = *std::ranges::max_element(room.held_bytes);
  for (int i = 0; i < devices; ++i) {
    const int64_t share_bytes = known ? most_stage_bytes_ : device_share_bytes(engine.worker(i).device());
    // The largest layer by itself is tried in any case: only the device can tell whether it fits.
    room.share_bytes.push_back(share_bytes > 0 ? std::max(share_bytes, largest_bytes) : 0);
  }
  return room;
}

int64_t ModelPlanner::room_on_host(bool overlap) const {
  if (host_room_bytes_ > 0) return host_room_bytes_;
  return std::max<int64_t>(1, memory::room_for_values() / (overlap ? 2 : 1));
}

schedule::Cut ModelPlanner::found(const Key& key, const Basis& basis, const Room& room, const schedule::Cut& simple,
                                  const Current* current) const {
  const PlanRequest& request = key.request;
  LayerCosts costs = basis.costs;
  Cluster cluster = basis.machine.cluster;
  // What a stage holds is limited as held_bytes say; what it moves stays as it is. Saved bytes do not travel, so they
  // take up the difference: a backward visit then counts `times` held bytes, and the room as many shares.
  int64_t times = 2;
  for (size_t l = 0; l < costs.size(); ++l) {
    const int64_t moved_bytes = 2 * costs[l].weight_bytes + costs[l].gradient_bytes;
    if (room.held_bytes[l] > 0) times = std::max(times, (moved_bytes + room.held_bytes[l] - 1) / room.held_bytes[l]);
  }
  for (size_t l = 0; l < costs.size(); ++l) {
    const int64_t moved_bytes = 2 * costs[l].weight_bytes + costs[l].gradient_bytes;
    costs[l].saved_bytes = std::max<int64_t>(0, times * room.held_bytes[l] - moved_bytes);
  }
  const schedule::CostSums sums = schedule::sums_of(costs, options_of(request));
  int64_t single_bytes = 0;  // each layer by itself must be possible
  for (int l = 0; l < sums.layers(); ++l)
    single_bytes = std::max(single_bytes, sums.visit_bytes({l, l + 1}, request.mode != PlanMode::kInference));

  schedule::SearchOptions options;
  options.plan = options_of(request);
  options.rules = rules_of(key.asynchronous);
  options.update.gb_per_s = request.mode == PlanMode::kInference ? 0 : basis.machine.update_gb_per_s;
  options.interleave = basis.early;
  if (current != nullptr) {
    options.starts = {current->made->cut};
    options.seed += schedule::kSeedsOfSearch * static_cast<unsigned>(current->searches);
  }
  options.promises = false;

  const Plan least = schedule::to_recipe(simple, sums, key.devices, options.plan);
  const double moves_ms = schedule::least_time(schedule::moved_bytes(least, costs, sums), cluster, options.update).ms;
  const double work_ms = schedule::work_ms(least, sums);
  options.effort = std::llround(std::clamp(kEffortPerMs * work_ms / key.devices, kLeastEffort,
                                           static_cast<double>(schedule::SearchOptions{}.effort)));
  const auto search = [&] {
    if (moves_ms * key.devices <= kLinksMatter * work_ms) return schedule::search(costs, cluster, options);
    simulate::LinkRules links;
    links.timing = options.rules;
    links.chunk_bytes = basis.machine.chunk_bytes;
    links.priorities = basis.machine.priorities;
    links.update = options.update;
    return simulate::search_links(costs, cluster, options, links);
  };
  if (request.mode != PlanMode::kInference) options.max_waiting_bytes = room_on_host(basis.early);
  const auto searched = [&] {
    while (true) {
      try {
        return search();
      } catch (const schedule::HostTooSmall&) {
        // With longer stages, forwards run once more. Else values that wait can be swapped out.
        if (!std::exchange(options.plan.single_backward_layers, false)) options.max_waiting_bytes *= 2;
      }
    }
  };
  // The best that fits, else the best if `any`.
  const auto chosen = [&](int64_t least_bytes, bool any) -> std::optional<schedule::Cut> {
    for (size_t i = 0; i < cluster.devices.size(); ++i) {
      const int64_t share_bytes = std::max(room.share_bytes[i], least_bytes);
      cluster.devices[i].memory_bytes = room.share_bytes[i] > 0 ? std::max(times * share_bytes, single_bytes) : 0;
    }
    std::optional<schedule::Cut> best;
    for (const schedule::PlanChoice& choice : searched()) {
      schedule::Cut cut = choice.cut;
      // Forward stages keep to the limit of backward stages, as their weights lie in memory beside the values of one.
      if (room.least() > 0) cut.forward = halved(cut.forward, room.held_bytes, std::max(room.least(), least_bytes));
      if (!fits_) return cut;
      schedule::Placer placer = placer_of(key, basis, recipe_of(key, basis, cut));
      std::vector<Plan> steps;
      for (int step = 0; step < kPredictedSteps; ++step) steps.push_back(placer.next());
      if (fits_(steps)) return cut;
      if (any && !best) best = std::move(cut);
    }
    return best;
  };
  if (longer_.stage_bytes > 0 && request.mode == PlanMode::kFused &&
      schedule::may_keep_layers(key.devices, request.gradient_groups)) {
    options.max_fused_layers = longer_.fused_layers;
    if (const std::optional<schedule::Cut> cut = chosen(longer_.stage_bytes, /*any=*/false)) return *cut;
  }
  options.max_fused_layers =
      room.least() > 0 && request.mode == PlanMode::kFused ? simple.backward.front().layers.size() : sums.layers();
  return *chosen(0, /*any=*/true);
}

Plan ModelPlanner::recipe_of(const Key& key, const Basis& basis, const schedule::Cut& cut) {
  const schedule::PlannerOptions options = options_of(key.request);
  return schedule::to_recipe(cut, schedule::sums_of(basis.costs, options), key.devices, options);
}

schedule::Placer ModelPlanner::placer_of(const Key& key, const Basis& basis, const Plan& recipe) const {
  Cluster cluster;
  if (basis.measured) cluster = basis.machine.cluster;
  cluster.devices.clear();
  for (const schedule::ClusterDevice& device : basis.machine.cluster.devices)
    cluster.devices.push_back({basis.measured ? device.speed : 1, 0, device.resident_bytes});
  return {recipe, basis.costs, cluster, rules_of(key.asynchronous)};
}

schedule::Cut ModelPlanner::simple_cut(const Key& key, const Basis& basis, const Room& limits, int fused_layers) const {
  schedule::PlannerOptions options = options_of(key.request);
  options.max_stage_bytes = limits.least();
  options.fused_layers = key.devices == 1 ? fused_layers : 0;
  LayerCosts held = basis.costs;
  for (size_t l = 0; l < held.size(); ++l) {
    held[l].weight_bytes = limits.held_bytes[l];
    held[l].gradient_bytes = held[l].saved_bytes = 0;
  }
  schedule::Cut simple = schedule::to_cut(schedule::choose_stages(held, key.devices, options));
  if (options.single_backward_layers) {
    const schedule::CostSums sums = schedule::sums_of(basis.costs, options);
    schedule::Cut single = schedule::with_single_backward_layers(simple, options.mode);
    const bool has_room = schedule::waiting_bytes(single, sums, options.microbatches) <= room_on_host(basis.early);
    if (has_room) simple = std::move(single);
  }
  return simple;
}

schedule::Stages ModelPlanner::longest_stages(Engine& engine, const PlanRequest& request, int fused_layers) const {
  Key key = key_of(engine, request);
  key.devices = 1;
  const Basis now = basis(engine, key);
  return schedule::to_stages(simple_cut(key, now, room(engine, now.costs, key.devices), fused_layers));
}

ModelPlanner::Made ModelPlanner::make(Engine& engine, const Key& key, const Basis& basis,
                                      const Current* current) const {
  const Room limits = room(engine, basis.costs, key.devices);
  const schedule::Cut simple = simple_cut(key, basis, limits, fused_layers_);
  const schedule::Cut cut = basis.measured ? found(key, basis, limits, simple, current) : simple;
  const Plan recipe = recipe_of(key, basis, cut);
  return {cut, recipe, placer_of(key, basis, recipe)};
}

double ModelPlanner::predicted_ms(Engine& engine, int microbatches, int gradient_groups, double scale) const {
  Key key = key_of(engine, request_of(PlanMode::kFused, microbatches));
  key.request.gradient_groups = gradient_groups;
  Basis now = basis(engine, key);
  for (LayerCost& cost : now.costs) {
    cost.forward_ms *= scale;
    cost.backward_ms *= scale;
    cost.activation_bytes = std::llround(static_cast<double>(cost.activation_bytes) * scale);
  }
  if (!now.measured) {
    // Estimated times are in no proportion to measured rates.
    now.machine = {};
    now.machine.cluster.devices.resize(static_cast<size_t>(key.devices));
  }
  const LayerCosts& costs = now.costs;
  schedule::SearchOptions options;
  options.plan = options_of(key.request);
  options.rules = rules_of(key.asynchronous);
  options.interleave = false;
  options.update.gb_per_s = now.machine.update_gb_per_s;
  options.effort = kLittleEffort;
  options.max_fused_layers = static_cast<int>(costs.size());
  Cluster cluster = now.machine.cluster;
  for (schedule::ClusterDevice& device : cluster.devices) device.memory_bytes = 0;
  return schedule::search(costs, cluster, options).front().rating.step_ms;
}

std::vector<Plan> ModelPlanner::preview(Engine& engine, const PlanRequest& request, int steps) const {
  const Key key = key_of(engine, request);
  const auto found = current_.find(key);
  schedule::Placer next = found != current_.end() && found->second.made ? found->second.made->placer
                                                                        : make(engine, key, basis(engine, key)).placer;
  std::vector<Plan> plans;
  for (int step = 0; step < steps; ++step) plans.push_back(next.next());
  return plans;
}

Plan ModelPlanner::next(Engine& engine, const PlanRequest& request) {
  const Key key = key_of(engine, request);
  if (current_.size() >= kMostPlans && !current_.contains(key)) current_.clear();
  Current& current = current_[key];
  const bool may_have_drifted = current.basis.measured && current.calls >= kCallsBetweenPlans;
  const bool may_search_on = current.basis.measured && current.searches < kMostSearches &&
                             current.calls >= kCallsBetweenSearches * (current.searches + 1);
  if (!current.made || !current.basis.measured || may_have_drifted || may_search_on) {
    Basis now = basis(engine, key);
    const bool drifted =
        may_have_drifted && (drift(current.basis.costs, now.costs) > kDrift ||
                             has_drifted(current.basis.machine, now.machine) || current.basis.early != now.early);
    if (!current.made || now.measured != current.basis.measured || drifted) {
      current.made.emplace(make(engine, key, now));
      current.basis = std::move(now);
      current.calls = current.searches = 0;
    } else if (may_search_on) {
      ++current.searches;
      now.early = current.basis.early;
      Made made = make(engine, key, now, &current);
      if (made.cut != current.made->cut) current.made.emplace(std::move(made));
      current.basis = std::move(now);
    }
  }
  ++current.calls;
  return current.made->placer.next();
}

schedule::Stages ModelPlanner::stages(Engine& engine, PlanMode mode, int microbatches) const {
  const Key key = key_of(engine, request_of(mode, microbatches));
  const Plan recipe = make(engine, key, basis(engine, key)).recipe;
  schedule::Stages stages{recipe.forward_stages(), {}};
  if (mode != PlanMode::kInference) stages.backward = recipe.backward_stages();
  return stages;
}

int64_t ModelPlanner::stage_limit_bytes(Engine& engine, int64_t limit_bytes) const {
  return stage_share_bytes(engine, meter_.costs(), limit_bytes);
}

std::optional<schedule::Cut> ModelPlanner::cut_of(const Plan& plan) const {
  const auto alike = [](const schedule::Job& a, const schedule::Job& b) {
    return a.phase == b.phase && a.layers == b.layers && a.microbatches == b.microbatches && a.order == b.order;
  };
  for (const auto& [key, current] : current_) {
    if (current.made && std::ranges::equal(current.made->recipe.jobs, plan.jobs, alike)) return current.made->cut;
  }
  return std::nullopt;
}

}  // namespace roundpipe::runtime
