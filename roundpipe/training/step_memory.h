#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <roundpipe/runtime/call/run_options.h>
#include <roundpipe/runtime/model/out_of_memory.h>
#include <roundpipe/runtime/model/values.h>
#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/runtime/step_memory.h>
#include <roundpipe/simulate/memory_simulator.h>
#include <roundpipe/training/host_memory.h>
#include <roundpipe/training/memory_prediction.h>

namespace roundpipe {

// One step, as far as its memory depends on it.
struct StepShape {
  runtime::Values batch;  // the largest microbatch, on the host
  runtime::Values label;
  LossFunction loss;  // null: gradients of the outputs come from elsewhere
  int microbatches = 1;
  int64_t total_rows = 1;  // of all microbatches
  schedule::PlanMode mode = schedule::PlanMode::kFused;
  RunOptions options;
  std::vector<std::string> savers;  // options that would reduce the memory of a row, worded for the user

  int64_t rows() const;  // of the largest microbatch
  int64_t label_bytes() const;
  bool trains() const { return mode != schedule::PlanMode::kInference; }
};
// The step of these microbatches. `structures`: of the inputs for layers outside of a call; empty: the inputs' own.
StepShape shape_of(const std::vector<runtime::Values>& inputs,
                   const std::vector<std::shared_ptr<const void>>& structures,
                   const std::vector<runtime::Values>& labels, LossFunction loss, schedule::PlanMode mode,
                   const RunOptions& options, std::vector<std::string> savers = {});

// What the user gives a model.
struct MemoryBudget {
  std::optional<int64_t> host_bytes = std::nullopt;    // for the model, its gradients and a fused optimizer
  std::optional<int64_t> device_bytes = std::nullopt;  // for a step, on each device; unset: what the device has
  bool measures = true;  // without device_bytes: whether a step is measured and planned within what devices have
};

// The memory of one model's steps: predicted by running each kind of layer once, kept within budgets, and compared with
// what was taken. With emulated layers (see runtime::Layer::takes_memory) nothing is predicted.
// Thread safety: the caller's thread. The pipeline has to outlive it.
class StepMemory {
 public:
  StepMemory(runtime::Pipeline& pipeline, MemoryBudget budget);

  const MemoryBudget& budget() const { return budget_; }
  // The host memory of the model with this optimizer.
  simulate::HostMemory host_with(const OptimizerMemory& optimizer, bool gradients_in_fp32) const;
  // Counts the memory of this optimizer from now on.
  void count(const OptimizerMemory& optimizer) { optimizer_ = optimizer; }

  // Plans the step within the budget of devices or, without one, within their own limits. Returns the recompute grain:
  // kLayer if a stage's graph would not fit. A step that no dimension makes larger than one planned before is planned
  // as that one, and not measured. Throws BudgetExceeded if the step cannot fit the budget with these microbatches;
  // what cannot be measured within the devices' own limits is not planned so.
  RecomputeGrain admit(const StepShape& step);
  // Whether the budget of devices, if there is one, has room for the step, layer by layer if need be.
  bool fits(const StepShape& step);
  using Footprints = std::vector<simulate::LayerFootprint>;
  // Of each layer, for the step's largest microbatch; a kind of step is measured once.
  const Footprints& footprints(const StepShape& step);
  // Predicts the step. Plans from now on keep to that.
  MemoryPrediction predict(const StepShape& step);
  // The last prediction that planned a step within the budget, with what was measured since.
  std::optional<MemoryPrediction> last() const;

  // The memory of a step that a device had no memory for, and the smallest change that would fit.
  // `shape`: the step with so many rows in its largest microbatch, which has `rows`. `cap_bytes`: of the device; 0:
  // unknown. Throws if nothing can be predicted.
  std::string explain(const std::function<StepShape(int64_t rows)>& shape, int64_t rows, int64_t cap_bytes);
  // The layers, without running any.
  std::string describe_layers() const;

 private:
  struct Least {
    RecomputeGrain grain;
    simulate::DeviceMemory device;
  };
  using Sizes = std::vector<int64_t>;
  struct Admitted {
    Sizes sizes;
    RecomputeGrain grain;
  };

  RecomputeGrain admit_within_caps(const StepShape& step);
  RecomputeGrain fit(const StepShape& step, int64_t budget_bytes);
  Least least(const StepShape& step, const Footprints& footprints, int64_t budget_bytes);
  // What makes the sizes of steps comparable.
  std::string kind_of(const StepShape& step) const;
  static Sizes sizes_of(const StepShape& step);
  simulate::StepSizes sizes(const StepShape& step, RecomputeGrain grain, Footprints footprints) const;
  std::vector<schedule::Plan> plans(const StepShape& step, RecomputeGrain grain, int steps) const;
  runtime::PlanRequest request(const StepShape& step, RecomputeGrain grain) const;
  runtime::MemoryLimit limit(int64_t budget_bytes) const;
  simulate::DeviceMemory tell_planner(const StepShape& step, const Footprints& footprints, RecomputeGrain grain);
  simulate::DeviceMemory on_device(const StepShape& step, RecomputeGrain grain, const Footprints& footprints,
                                   int64_t limit_bytes) const;
  simulate::HostMemory host_memory(const OptimizerMemory& optimizer) const;
  HostPrediction on_host(const StepShape& step, RecomputeGrain grain, const OptimizerMemory& optimizer);
  std::vector<Activations> activations(const StepShape& step, RecomputeGrain grain) const;
  // `measured`: the footprints of so many rows; null: in proportion to the step's.
  std::string change(const StepShape& step, const Footprints& footprints, int64_t budget_bytes,
                     const std::function<std::string(int64_t bytes)>& larger,
                     const std::function<Footprints(int64_t rows)>& measured);
  std::pair<Footprints, int64_t> footprints_of_some(const std::function<StepShape(int64_t rows)>& shape, int64_t rows);
  void compare();
  int64_t peak_bytes() const;

  runtime::Pipeline& pipeline_;
  MemoryBudget budget_;
  bool has_emulated_;
  std::optional<OptimizerMemory> optimizer_;
  std::map<std::pair<std::string, Sizes>, Footprints> measured_;
  std::map<std::string, std::vector<Admitted>> admitted_;  // within the budget, by kind
  runtime::StepsWithinCap within_cap_;
  std::optional<MemoryPrediction> last_;
  double correction_ = 1;  // of the predicted work of layers, by what was measured
};

// What an error says of a call that a device had no memory for. It keeps no values of the batch, and predicts only when
// asked. `memory`: ends with its model.
std::shared_ptr<const runtime::StepNote> make_step_note(std::weak_ptr<StepMemory> memory, const StepShape& step);

}  // namespace roundpipe
