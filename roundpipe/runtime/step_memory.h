#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/simulate/memory_simulator.h>

namespace roundpipe::runtime {

// The memory limit of the device that has the least, in bytes; 0 = none has one.
int64_t smallest_cap_bytes(Engine& engine);
// Lets no device of the pool take more than so many bytes.
void limit_memory(Engine& engine, int64_t limit_bytes);
// What predictions of the engine's devices go by, under a cap of `cap_bytes`.
simulate::DeviceRules device_rules(Engine& engine, int64_t cap_bytes);

// What a step may take on each device.
struct MemoryLimit {
  int64_t budget_bytes = 0;     // plans keep to it if they can; 0 = none
  simulate::DeviceRules rules;  // of the prediction
  double work_factor = 1;       // times the predicted work of layers
};

// Tells the model's planner what a step with these sizes takes: plans from now on keep within the budget, if they can,
// and take no more than the next one. With a budget, the fused stage gets as many layers as fit, since its layers are
// not recomputed: on one device from the first plan on; on a few that share gradient groups, wherever a plan from
// measurements finds that this shortens the step. Returns the predicted memory of the device with the highest peak,
// with the longest stages that later plans may have. REQUIRES: `sizes` are of the request's recompute grain.
simulate::DeviceMemory plan_as(Pipeline& pipeline, const Route& route, const PlanRequest& request,
                               const simulate::StepSizes& sizes, const MemoryLimit& limit);

// How a step is planned.
struct PlannedMemory {
  RecomputeGrain grain = RecomputeGrain::kStage;
  simulate::DeviceMemory device;  // predicted, of the device with the highest peak
  bool fits = true;
};

// The same, but layer by layer if it does not fit otherwise. `sizes`: of any grain.
PlannedMemory plan_within(Pipeline& pipeline, const Route& route, PlanRequest request, simulate::StepSizes sizes,
                          const MemoryLimit& limit);

// The same, within the smallest cap, if there is one. Stages or a plan that the route gives stay as they are.
PlannedMemory plan_within_caps(Pipeline& pipeline, const Route& route, const PlanRequest& request,
                               const simulate::StepSizes& sizes);

// Plans a model's steps within the memory that its devices have. A step that is larger than all of its kind before is
// measured first; others fit if that one does.
// Thread safety: one thread at a time.
class StepsWithinCap {
 public:
  struct Step {
    std::string kind;   // what makes steps comparable: the number of devices, modes, types
    int64_t bytes = 0;  // of its inputs and labels, one microbatch
    int microbatches = 1;
  };

  // A training step whose largest microbatch has these inputs, and labels of so many bytes. Nothing if it is not to be
  // planned within a cap: no device has one, or the route gives stages or a plan. Caller's thread.
  static std::optional<Step> step_of(const ModelState& model, const Route& route, const PlanRequest& request,
                                     const std::vector<at::Tensor>& inputs, int64_t label_bytes);

  // The recompute grain of a step that need not be measured; empty for another.
  std::optional<RecomputeGrain> known(const Step& step) const;
  // The step, and smaller ones of its kind, have been planned so, or cannot be measured. If it does not fit, larger
  // ones run layer by layer, and the next smaller one is planned again.
  void admit(const Step& step, const PlannedMemory& planned);

 private:
  struct Admitted {
    int64_t bytes = 0;
    int microbatches = 0;
    RecomputeGrain grain = RecomputeGrain::kStage;
  };
  std::map<std::string, Admitted> largest_;              // that fit
  std::map<std::string, std::int64_t> too_large_bytes_;  // of the smallest that do not
};

}  // namespace roundpipe::runtime
