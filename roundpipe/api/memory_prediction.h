#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <roundpipe/api/loss.h>
#include <roundpipe/api/run_options.h>
#include <roundpipe/runtime/model_optimizer.h>
#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/simulate/memory_simulator.h>

namespace roundpipe {

// The predicted memory of a model's training step, in bytes.
struct MemoryPrediction {
  // On the device with the highest peak, at that peak.
  simulate::DeviceMemory device;
  // On the host: the model and the fused optimizer that was made for it or, without one, a fused Adam with fp32
  // moments,
  simulate::HostMemory host;
  int64_t host_values = 0;        // values that wait between stages,
  int64_t host_partial_sums = 0;  // sums of gradients of layers that devices share,
  int64_t kept_for_failures = 0;  // and what is kept to run jobs again (RunOptions: fault_tolerant, verify_every).

  int64_t host_total() const {
    return host.weights + host.gradients + host.masters + host.moments + host_values + host_partial_sums +
           kept_for_failures;
  }
  // A table of all of it.
  std::string text() const;
};

// One step whose memory is to be predicted.
struct StepShape {
  runtime::Values batch;  // the largest microbatch, on the host
  runtime::Values label;
  int microbatches = 1;
};

// The footprint of each layer. Each runs once, on this thread, with copies of the microbatch, forward and backward;
// only shapes count. `loss`: null if gradients of the outputs come from elsewhere. Throws what a layer or the loss
// throws. REQUIRES: as predict_step.
std::vector<simulate::LayerFootprint> measure_layers(const runtime::ModelState& model, const StepShape& shape,
                                                     const LossFunction* loss, device::Device& device);
// The sizes of that step.
simulate::StepSizes step_sizes(const runtime::ModelState& model, const StepShape& shape, const RunOptions& options,
                               std::vector<simulate::LayerFootprint> footprints);

// Predicts a step of `pipeline`, whose layers are measured. Plans keep to the measured sizes from now on.
// `optimizer`: the fused one of the model; null: none was made. Throws what a layer or the loss throws. REQUIRES: the
// pipeline has drained and shows its weights.
MemoryPrediction predict_step(runtime::Pipeline& pipeline, const StepShape& shape, const LossFunction& loss,
                              const RunOptions& options, const runtime::ModelOptimizer* optimizer);

}  // namespace roundpipe
