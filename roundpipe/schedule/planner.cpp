#include <roundpipe/schedule/planner.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>

#include <roundpipe/schedule/partition.h>

namespace roundpipe::schedule {

namespace {

void check_options(const std::string& where, int layers, int devices, const PlannerOptions& options) {
  const auto require = [&](bool ok, const char* field, auto value, const std::string& expected) {
    if (!ok)
      throw std::invalid_argument("[" + where + "] " + field + " is " + std::to_string(value) + ", expected " +
                                  expected);
  };
  require(devices >= 1, "devices", devices, "at least 1");
  require(options.microbatches >= 1, "microbatches", options.microbatches, "at least 1");
  require(options.min_stages >= 0, "min_stages", options.min_stages, "0 (one a device) or more");
  require(options.upper_threshold >= 1 && std::isfinite(options.upper_threshold), "upper_threshold",
          options.upper_threshold, "a finite number of at least 1");
  require(options.max_stage_bytes >= 0, "max_stage_bytes", options.max_stage_bytes, "0 (no cap) or more");
  require(options.first_backward_layer >= 0 && options.first_backward_layer <= layers, "first_backward_layer",
          options.first_backward_layer, "0 to " + std::to_string(layers));
  require(options.fused_layers >= 0, "fused_layers", options.fused_layers, "0 (as balance says) or more");
  require(options.gradient_groups >= 0, "gradient_groups", options.gradient_groups, "0 (cut anywhere) or more");
  require(options.first_device >= 0 && options.first_device < devices, "first_device", options.first_device,
          "0 to " + std::to_string(devices - 1));
}

// Cuts `layers` into stages; `cost_of` and `bytes_of` give a layer's time and bytes.
template <typename CostOf, typename BytesOf>
std::vector<Range> cut(const LayerCosts& costs, Range layers, int min_stages, const PlannerOptions& options,
                       CostOf cost_of, BytesOf bytes_of) {
  if (layers.size() == 0) return {};
  std::vector<double> cost;
  std::vector<std::int64_t> bytes;
  for (int layer = layers.first; layer < layers.last; ++layer) {
    cost.push_back(cost_of(costs[static_cast<std::size_t>(layer)]));
    bytes.push_back(bytes_of(costs[static_cast<std::size_t>(layer)]));
    if (options.max_stage_bytes > 0 && bytes.back() > options.max_stage_bytes)
      throw std::invalid_argument("[choose_stages] layer " + std::to_string(layer) + " needs " +
                                  std::to_string(bytes.back()) + " bytes, expected at most max_stage_bytes " +
                                  std::to_string(options.max_stage_bytes) + "; raise the cap or split the layer");
  }
  const double even = std::accumulate(cost.begin(), cost.end(), 0.0) / min_stages;
  // The last factor tolerates rounding in the sums.
  const double limit = options.upper_threshold * std::max(even, *std::ranges::max_element(cost)) * (1 + 1e-9);
  const int stages = std::max(min_stages, fewest_stages(cost, limit, bytes, options.max_stage_bytes));
  std::vector<Range> result = balanced_partition(cost, stages, bytes, options.max_stage_bytes);
  for (Range& stage : result) stage = {stage.first + layers.first, stage.last + layers.first};
  return result;
}

}  // namespace

CostSums sums_of(const LayerCosts& costs, const PlannerOptions& options) {
  const int layers = static_cast<int>(costs.size());
  const int below = !options.single_backward_layers ? 0 : options.mode == PlanMode::kFused ? layers - 1 : layers;
  return CostSums(costs, options.first_backward_layer, below);
}

Stages choose_stages(const LayerCosts& costs, int devices, const PlannerOptions& options) {
  validate(costs);
  const int layers = static_cast<int>(costs.size());
  check_options("choose_stages", layers, devices, options);
  const int min_stages = options.min_stages > 0 ? options.min_stages : devices;

  Stages stages;
  Range forward{0, layers};
  if (options.mode != PlanMode::kInference) {
    // The fused stage takes the loss even if nothing goes backward.
    const bool fused = options.mode == PlanMode::kFused;
    const int first = fused ? std::min(options.first_backward_layer, layers - 1) : options.first_backward_layer;
    const int apart = fused ? std::min(options.fused_layers, layers - first) : 0;
    stages.backward = cut(
        costs, {first, layers - apart}, min_stages, options,
        [](const LayerCost& c) { return c.forward_ms + c.backward_ms; },
        [](const LayerCost& c) { return c.weight_bytes + c.gradient_bytes + c.saved_bytes; });
    if (apart > 0) stages.backward.push_back({layers - apart, layers});
    std::ranges::reverse(stages.backward);
    if (fused) forward.last = stages.backward.front().first;
  }
  stages.forward = cut(
      costs, forward, min_stages, options, [](const LayerCost& c) { return c.forward_ms; },
      [](const LayerCost& c) { return c.weight_bytes; });
  return stages;
}

Plan make_plan(const Stages& stages, int layers, int devices, const PlannerOptions& options) {
  check_options("make_plan", layers, devices, options);
  Plan plan{layers, options.microbatches, devices, options.first_backward_layer, {}};
  const auto add = [&](Phase phase, Range stage) {
    const int turn = static_cast<int>(plan.jobs.size()) % devices;
    const int device = (options.first_device + turn) % devices;
    plan.jobs.push_back({phase, stage, {0, options.microbatches}, device});
  };
  for (const Range& stage : stages.forward) add(Phase::kForward, stage);
  for (std::size_t i = 0; i < stages.backward.size(); ++i)
    add(options.mode == PlanMode::kFused && i == 0 ? Phase::kFused : Phase::kBackward, stages.backward[i]);
  validate(plan, options.mode);
  return plan;
}

}  // namespace roundpipe::schedule
