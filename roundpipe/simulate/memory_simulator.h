#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <roundpipe/core/memory_rules.h>
#include <roundpipe/core/residency.h>
#include <roundpipe/schedule/layer_cost.h>
#include <roundpipe/schedule/plan.h>
#include <roundpipe/simulate/predicted_memory.h>

namespace roundpipe::simulate {

// One parameter or buffer of a model.
struct ParameterSize {
  std::int64_t elements = 0;
  std::int64_t element_bytes = 0;
  std::int64_t master_bytes = 0;  // what the fp32 master of an element takes beyond the weight
  std::int64_t moment_bytes = 0;  // what the optimizer keeps of all elements, see optim::state_bytes
  bool trained = false;
  bool tied = false;  // several layers share it

  std::int64_t bytes() const { return elements * element_bytes; }
};

// One layer's own bytes on a device.
struct LayerBytes {
  std::int64_t weights = 0;         // in a weight slot
  std::int64_t gradients = 0;       // in flight to the host, if one job makes the whole sum; parts go as they are
  std::int64_t sums = 0;            // of gradients
  std::int64_t rounded = 0;         // gradients that are rounded into separate memory before they go
  JoinedGradients joined;           // of weights that this layer is the first to have, and others share
  std::vector<FrozenBlock> frozen;  // of `weights`: blocks that no job changes, which may be resident

  // The key of blocks that belong to one layer alone.
  static constexpr std::uint64_t kOwn = ~std::uint64_t{0};
};
LayerBytes layer_bytes(std::span<const ParameterSize> parameters);

// Bytes that one layer takes on a device for one microbatch.
struct LayerFootprint {
  std::int64_t inputs = 0;            // the layer's inputs
  std::int64_t outputs = 0;           // the values that it passes on; for the last layer, with the loss
  std::int64_t output_gradients = 0;  // the gradients that its backward receives
  std::int64_t forward = 0;           // the peak during the forward, beyond the inputs
  std::int64_t saved = 0;             // the values that its graph holds until the backward, including its outputs
  std::int64_t backward = 0;          // the peak during the backward, beyond the inputs and the received gradients
};
// The footprint of `rows` rows by that of `measured_rows`: nearly all memory of a layer is proportional to its rows.
LayerFootprint scaled(const LayerFootprint& footprint, std::int64_t rows, std::int64_t measured_rows);
// What a layer holds while the layers above it in its stage are recomputed and go backward.
std::int64_t kept_bytes(const LayerFootprint& footprint, RecomputeGrain grain);

// The layers of a model, and one microbatch of a step.
struct StepSizes {
  std::vector<LayerBytes> layers;
  std::vector<LayerFootprint> footprints;  // one for each layer
  RecomputeGrain grain = RecomputeGrain::kStage;
  std::int64_t label_bytes = 0;
  int gradient_groups = 1;  // see schedule::GradientGroups
};

struct DeviceRules {
  std::int64_t cap_bytes = 0;  // if the next job's weights do not fit beside the running job, they come later; 0 = none
  bool waits = false;          // a job begins only when everything that the previous job sends has gone
  std::int64_t most_resident_bytes = -1;  // of frozen weights that stay; below 0: as many as find room
};

// The highest peak of any device while it runs the jobs of `plans`, one plan for each step. Follows a device's jobs in
// their order: while one job runs, the weights and first values of the next job are uploaded; gradients are downloaded
// while the next job begins. Frozen weights stay as choose_residents() says, of all layers, since with time each device
// may meet each of them. Throws std::invalid_argument if sizes and plans do not match.
DeviceMemory predict_device(std::span<const schedule::Plan> plans, const StepSizes& sizes, const DeviceRules& rules);
// The peak of each device, each of which has a cap of its own. REQUIRES: a cap for each device of the plans.
std::vector<DeviceMemory> predict_devices(std::span<const schedule::Plan> plans, const StepSizes& sizes,
                                          std::span<const std::int64_t> cap_bytes);

// The most that a stage may take of a device with `budget_bytes`, in weights, gradients in flight and kept activations.
// At least 1. Throws std::invalid_argument without layers.
std::int64_t stage_limit_bytes(const StepSizes& sizes, std::int64_t budget_bytes);
// The most that a stage takes of them: a backward stage or, of a plan without any, a forward stage.
std::int64_t largest_stage_bytes(std::span<const schedule::Plan> plans, const StepSizes& sizes);

// Bytes that wait on the host between stages: all microbatches' inputs of each backward stage, and of the step.
std::int64_t waiting_on_host(const schedule::Plan& plan, std::span<const LayerFootprint> footprints, int microbatches);

// Bytes on the host of the sums that devices send of the layers they share, beyond the layers' gradients. Throws
// std::invalid_argument if sizes and plan do not match.
std::int64_t partial_sum_bytes(const schedule::Plan& plan, const StepSizes& sizes);

// `blocks`: tensors whose memory is one block; if any of them is trained, there are gradients for all of them.
HostMemory predict_host(std::span<const std::vector<ParameterSize>> blocks);
// The sums of a parameter that `layers` layers share, until they are added up, beyond its gradient.
std::int64_t tied_sum_bytes(const ParameterSize& parameter, int layers);

}  // namespace roundpipe::simulate
