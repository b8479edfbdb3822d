#include <roundpipe/runtime/step_memory.h>

#include <algorithm>
#include <variant>

#include <roundpipe/core/error.h>
#include <roundpipe/memory/crossing.h>
#include <roundpipe/schedule/plan_choice.h>

namespace roundpipe::runtime {

using schedule::Plan;
using simulate::DeviceMemory;

namespace {

// Predictions are within 3 % of the measured peak, and an allocator does not give every byte of its memory.
constexpr double kCapShare = 0.94;
constexpr int64_t kOff = 50;  // a later plan may take one part in so many more than what was predicted

DeviceMemory predicted_peak(const std::vector<Plan>& plans, const simulate::StepSizes& sizes,
                            const MemoryLimit& limit) {
  DeviceMemory peak = simulate::predict_device(plans, sizes, limit.rules);
  peak.work = static_cast<int64_t>(static_cast<double>(peak.work) * limit.work_factor);
  return peak;
}

}  // namespace

int64_t smallest_cap_bytes(Engine& engine) {
  int64_t cap = 0;
  for (int i = 0; i < engine.size(); ++i) {
    const int64_t own = engine.worker(i).device().memory_limit_bytes();
    if (own > 0 && (cap == 0 || own < cap)) cap = own;
  }
  return cap;
}

void limit_memory(Engine& engine, int64_t limit_bytes) {
  for (int i = 0; i < engine.pool_size(); ++i) engine.pool_worker(i).device().limit_memory(limit_bytes);
}

simulate::DeviceRules device_rules(Engine& engine, int64_t cap_bytes) {
  int64_t most_resident_bytes = 0;
  for (int i = 0; i < engine.size() && most_resident_bytes >= 0; ++i) {
    const int64_t own = engine.worker(i).device().most_resident_bytes();
    most_resident_bytes = own < 0 ? -1 : std::max(most_resident_bytes, own);
  }
  return {cap_bytes, engine.worker(0).device().copies_on_compute_cores(), most_resident_bytes};
}

DeviceMemory plan_as(Pipeline& pipeline, const Route& route, const PlanRequest& request,
                     const simulate::StepSizes& sizes, const MemoryLimit& limit) {
  const std::shared_ptr<Engine> engine = Engine::current();
  ModelState& model = pipeline.model();
  ModelPlanner& planner = pipeline.planner();
  std::vector<int64_t> kept, passed_on;
  for (const simulate::LayerFootprint& footprint : sizes.footprints) {
    kept.push_back(simulate::kept_bytes(footprint, sizes.grain));
    passed_on.push_back(footprint.outputs);
  }
  const int64_t most_bytes = limit.budget_bytes > 0 ? simulate::stage_limit_bytes(sizes, limit.budget_bytes) : 0;
  const auto plans_of = [&](const Route& by) {
    return preview_plans(model, by, request, planner, *engine, kPredictedSteps);
  };
  const auto predicted = [&](const std::vector<Plan>& plans) { return predicted_peak(plans, sizes, limit); };

  planner.set_bytes(kept, passed_on, most_bytes);
  const bool is_alone = engine->size() == 1;
  int fused_layers = 0;
  ModelPlanner::LongerStages longer;
  DeviceMemory longest;
  const bool may_lengthen = limit.budget_bytes > 0 && std::holds_alternative<std::monostate>(route) &&
                            request.mode == schedule::PlanMode::kFused && sizes.grain == RecomputeGrain::kStage &&
                            schedule::may_keep_layers(engine->size(), request.gradient_groups);
  if (may_lengthen) {
    const PlanRequest whole = completed(model, request);
    const auto plans_with = [&](int layers) { return plans_of(planner.longest_stages(*engine, whole, layers)); };
    const auto fits = [&](int layers) { return predicted(plans_with(layers)).needed() <= limit.budget_bytes; };
    int most = planner.longest_stages(*engine, whole, 0).backward.front().size();
    int too_many = model.layer_count() - whole.first_backward_layer + 1;
    if (fits(most)) {
      const int balanced = most;
      while (too_many - most > 1) {
        const int middle = (most + too_many) / 2;
        (fits(middle) ? most : too_many) = middle;
      }
      if (is_alone) {
        fused_layers = most > balanced ? most : 0;
      } else {
        const std::vector<Plan> plans = plans_with(most);
        longest = predicted(plans);
        longer = {most, simulate::largest_stage_bytes(plans, sizes)};
      }
    }
    planner.set_bytes(kept, passed_on, most_bytes, fused_layers);
  }
  planner.set_bytes(kept, passed_on, simulate::largest_stage_bytes(plans_of(route), sizes), fused_layers);
  DeviceMemory found = predicted(plans_of(route));
  if (longest.needed() > found.needed()) {
    found = longest;
    planner.allow_longer(longer);
  }
  planner.keep_within([sizes, limit, most_bytes = found.needed()](const std::vector<Plan>& steps) {
    return predicted_peak(steps, sizes, limit).needed() <= most_bytes + most_bytes / kOff;
  });
  model.work_bytes.store(std::max<int64_t>(1, found.beside_weights()));
  return found;
}

PlannedMemory plan_within(Pipeline& pipeline, const Route& route, PlanRequest request, simulate::StepSizes sizes,
                          const MemoryLimit& limit) {
  for (;;) {
    sizes.grain = request.recompute_grain;
    const DeviceMemory wanted = plan_as(pipeline, route, request, sizes, limit);
    const bool fits = limit.budget_bytes == 0 || wanted.needed() <= limit.budget_bytes;
    if (fits || request.recompute_grain == RecomputeGrain::kLayer) return {request.recompute_grain, wanted, fits};
    request.recompute_grain = RecomputeGrain::kLayer;
  }
}

PlannedMemory plan_within_caps(Pipeline& pipeline, const Route& route, const PlanRequest& request,
                               const simulate::StepSizes& sizes) {
  const std::shared_ptr<Engine> engine = Engine::current();
  MemoryLimit limit;
  limit.rules = device_rules(*engine, smallest_cap_bytes(*engine));
  const bool is_open = std::holds_alternative<std::monostate>(route);
  if (is_open) limit.budget_bytes = static_cast<int64_t>(static_cast<double>(limit.rules.cap_bytes) * kCapShare);
  return plan_within(pipeline, route, request, sizes, limit);
}

std::optional<StepsWithinCap::Step> StepsWithinCap::step_of(const ModelState& model, const Route& route,
                                                            const PlanRequest& request,
                                                            const std::vector<at::Tensor>& inputs,
                                                            int64_t label_bytes) {
  const std::shared_ptr<Engine> engine = Engine::current();
  const int64_t cap_bytes = smallest_cap_bytes(*engine);
  const bool is_open = std::holds_alternative<std::monostate>(route);
  if (cap_bytes == 0 || !is_open || request.mode == schedule::PlanMode::kInference) return std::nullopt;
  Step step;
  step.kind = concat(static_cast<int>(request.mode), " ", static_cast<int>(request.recompute_grain), " ",
                     request.gradient_groups, " ", engine->size(), " ", cap_bytes);
  for (const std::unique_ptr<LayerState>& state : model.layers) step.kind += concat(" ", state->layer->mode_key());
  for (const at::Tensor& input : inputs)
    step.kind += concat(" ", input.scalar_type(), input.dim(), input.requires_grad());
  step.bytes = label_bytes + memory::settled_bytes(inputs);
  step.microbatches = request.microbatches;
  return step;
}

std::optional<RecomputeGrain> StepsWithinCap::known(const Step& step) const {
  const auto too_large = too_large_bytes_.find(step.kind);
  if (too_large != too_large_bytes_.end() && step.bytes >= too_large->second) return RecomputeGrain::kLayer;
  const auto largest = largest_.find(step.kind);
  if (largest == largest_.end()) return std::nullopt;
  const auto& [bytes, microbatches, grain] = largest->second;
  return step.bytes <= bytes && step.microbatches <= microbatches ? std::optional(grain) : std::nullopt;
}

void StepsWithinCap::admit(const Step& step, const PlannedMemory& planned) {
  if (!planned.fits) {
    largest_.erase(step.kind);
    const auto [too_large, is_new] = too_large_bytes_.try_emplace(step.kind, step.bytes);
    too_large->second = std::min(too_large->second, step.bytes);
    return;
  }
  Admitted& largest = largest_[step.kind];
  largest = {std::max(largest.bytes, step.bytes), std::max(largest.microbatches, step.microbatches), planned.grain};
}

}  // namespace roundpipe::runtime
