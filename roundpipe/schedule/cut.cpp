#include <roundpipe/schedule/cut.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <utility>

#include <roundpipe/schedule/gradient_groups.h>
#include <roundpipe/schedule/progress.h>

namespace roundpipe::schedule {

Cut to_cut(const Stages& stages) {
  Cut cut;
  for (const Range& layers : stages.forward) cut.forward.push_back({layers, 1});
  for (const Range& layers : stages.backward) cut.backward.push_back({layers, 1});
  return cut;
}

Stages to_stages(const Cut& cut) {
  Stages stages;
  for (const CutStage& stage : cut.forward) stages.forward.push_back(stage.layers);
  for (const CutStage& stage : cut.backward) stages.backward.push_back(stage.layers);
  return stages;
}

namespace {

// Groups equal stages: "5x3" for five stages of three layers, "5x3*2" if each has two replicas.
std::string describe(std::span<const CutStage> stages) {
  std::string text;
  for (std::size_t i = 0; i < stages.size();) {
    std::size_t end = i;
    while (end < stages.size() && stages[end].layers.size() == stages[i].layers.size() &&
           stages[end].replicas == stages[i].replicas)
      ++end;
    if (!text.empty()) text += ' ';
    text += std::to_string(end - i);
    text += 'x';
    text += std::to_string(stages[i].layers.size());
    if (stages[i].replicas > 1) {
      text += '*';
      text += std::to_string(stages[i].replicas);
    }
    i = end;
  }
  return text.empty() ? "none" : text;
}

}  // namespace

Cut with_single_backward_layers(Cut cut, PlanMode mode) {
  std::vector<CutStage> stages;
  for (const CutStage& stage : cut.backward) {
    if (mode == PlanMode::kFused && stages.empty()) {
      stages.push_back(stage);
      continue;
    }
    for (int layer = stage.layers.last; layer-- > stage.layers.first;)
      stages.push_back({{layer, layer + 1}, stage.replicas});
  }
  cut.backward = std::move(stages);
  return cut;
}

std::string to_string(const Cut& cut) {
  std::string text = "forward ";
  text += describe(cut.forward);
  text += " | backward ";
  text += describe(cut.backward);
  if (cut.interleave != 1) {
    text += " | interleave ";
    std::string number = std::to_string(cut.interleave);
    text += number.substr(0, number.find('.') + 3);
  }
  return text;
}

namespace {

// Whether the gradients of a visit are summed in groups of microbatches.
bool sums_in_groups(Range layers, bool backward, const CostSums& sums, const PlannerOptions& options) {
  return options.gradient_groups > 0 && backward && sums.trains(layers);
}

}  // namespace

int most_replicas(Range layers, bool backward, const CostSums& sums, const PlannerOptions& options) {
  if (!sums_in_groups(layers, backward, sums, options)) return options.microbatches;
  return std::min(options.gradient_groups, options.microbatches);
}

Plan to_recipe(const Cut& cut, const CostSums& sums, int devices, const PlannerOptions& options) {
  Plan plan{sums.layers(), options.microbatches, devices, options.first_backward_layer, {}};
  std::vector<double> start_ms;
  double work_ms = 0;
  const auto add = [&](Phase phase, const CutStage& stage) {
    const bool goes_backward = phase != Phase::kForward;
    const int most = most_replicas(stage.layers, goes_backward, sums, options);
    const bool by_groups = sums_in_groups(stage.layers, goes_backward, sums, options);
    const int replicas = std::min(stage.replicas, most);
    for (int replica = 0; replica < replicas; ++replica) {
      Range microbatches{options.microbatches * replica / replicas, options.microbatches * (replica + 1) / replicas};
      if (by_groups) {
        // The groups themselves are shared out as evenly.
        const Range groups = GradientGroups(most, replicas).microbatches({replica, replica + 1});
        microbatches = GradientGroups(options.microbatches, most).microbatches(groups);
      }
      plan.jobs.push_back({phase, stage.layers, microbatches, 0});
      start_ms.push_back(work_ms);
    }
    work_ms += visit_ms(phase, stage.layers, sums) * options.microbatches;
  };
  for (const CutStage& stage : cut.forward) add(Phase::kForward, stage);
  for (std::size_t i = 0; i < cut.backward.size(); ++i)
    add(options.mode == PlanMode::kFused && i == 0 ? Phase::kFused : Phase::kBackward, cut.backward[i]);
  for (std::size_t i = 0; i < plan.jobs.size() && work_ms > 0; ++i)
    plan.jobs[i].order = cut.interleave * start_ms[i] / work_ms;
  return plan;
}

double traffic_ratio(const Plan& plan, const CostSums& sums) {
  const bool trains = mode_of(plan) != PlanMode::kInference;
  const int counted = plan.layers > 1 ? plan.layers - 1 : 1;
  double moved = 0;
  for (const Job& job : plan.jobs)
    moved += static_cast<double>(
        sums.weight_bytes({std::min(job.layers.first, counted), std::min(job.layers.last, counted)}));
  const int trained = std::min(plan.first_backward_layer, counted);
  double once = static_cast<double>(sums.weight_bytes({0, counted}));
  if (trains) once += static_cast<double>(sums.weight_bytes({trained, counted}));
  return once > 0 ? moved / once : 1;
}

std::int64_t waiting_bytes(const Cut& cut, const CostSums& sums, int microbatches) {
  std::int64_t bytes = 0;
  for (const CutStage& stage : cut.backward) bytes += microbatches * sums.input_bytes(stage.layers.first);
  return bytes;
}

PartitionTable partitions_of(const CostSums& sums, Range layers, bool backward, std::int64_t room_bytes) {
  std::vector<double> prefix{0};
  std::vector<int> first_that_fits{0};
  int first = layers.first;
  for (int end = layers.first + 1; end <= layers.last; ++end) {
    const Range whole{layers.first, end};
    prefix.push_back(backward ? sums.recompute_ms(whole) + sums.backward_ms(whole) : sums.forward_ms(whole));
    while (first < end - 1 && !sums.fits({first, end}, backward, room_bytes)) ++first;
    first_that_fits.push_back(first - layers.first);
  }
  return {layers.first, std::move(prefix), std::move(first_that_fits)};
}

namespace {

// Fills `layers`, from the last one down or from the first one up, into stages of at most `limit_ms` each (or of one
// layer).
template <typename CostOf>
std::vector<Range> fill(Range layers, bool downward, double limit_ms, CostOf cost_of) {
  std::vector<Range> stages;
  double filled_ms = 0;
  for (int i = 0; i < layers.size(); ++i) {
    const int layer = downward ? layers.last - 1 - i : layers.first + i;
    const double ms = cost_of(Range{layer, layer + 1});
    if (stages.empty() || filled_ms + ms > limit_ms) {
      stages.push_back({layer, layer + 1});
      filled_ms = ms;
    } else {
      (downward ? stages.back().first : stages.back().last) = downward ? layer : layer + 1;
      filled_ms += ms;
    }
  }
  return stages;
}

template <typename CostOf>
double limit_of(Range layers, int min_stages, double threshold, CostOf cost_of) {
  double longest = 0, total = 0;
  for (int layer = layers.first; layer < layers.last; ++layer) {
    longest = std::max(longest, cost_of(Range{layer, layer + 1}));
    total += cost_of(Range{layer, layer + 1});
  }
  return threshold * std::max(longest, total / min_stages) * (1 + 1e-9);
}

}  // namespace

Stages greedy_stages(const LayerCosts& costs, int devices, const PlannerOptions& options) {
  const CostSums sums = sums_of(costs, options);
  const int min_stages = options.min_stages > 0 ? options.min_stages : devices;
  Stages stages;
  Range forward{0, sums.layers()};
  if (options.mode != PlanMode::kInference) {
    const auto cost = [&](Range layers) { return sums.recompute_ms(layers) + sums.backward_ms(layers); };
    const bool fused = options.mode == PlanMode::kFused;
    const int first = fused ? std::min(options.first_backward_layer, sums.layers() - 1) : options.first_backward_layer;
    const Range trained{first, sums.layers()};
    stages.backward = fill(trained, true, limit_of(trained, min_stages, options.upper_threshold, cost), cost);
    if (fused) forward.last = stages.backward.front().first;
  }
  const auto cost = [&](Range layers) { return sums.forward_ms(layers); };
  stages.forward = fill(forward, false, limit_of(forward, min_stages, options.upper_threshold, cost), cost);
  return stages;
}

}  // namespace roundpipe::schedule
