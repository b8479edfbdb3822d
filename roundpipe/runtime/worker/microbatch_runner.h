#pragma once

#include <vector>

#include <roundpipe/runtime/worker/gradient_sums.h>

namespace roundpipe::runtime {

// Runs single microbatches of jobs on one device: forward, fused or backward. A microbatch that has run out of memory
// may be run again, see Outbox and GradientSums. Used by the device's thread, inside its compute scope.
class MicrobatchRunner {
 public:
  MicrobatchRunner(device::Device& device, DeviceRoom& room, Outbox& outbox, GradientSums& sums, LayerRunner& layers)
      : device_(device), room_(room), outbox_(outbox), sums_(sums), layers_(layers) {}

  // REQUIRES: the microbatch is staged, the job's weights are bound.
  void run(JobRun& run, int microbatch, Frugality frugality);

  // For the latest microbatch: the end of its recompute on the device (null = there was none), and when the host saw
  // that the gradients for its backward had arrived.
  struct GradientWait {
    device::EventPtr recomputed;
    double arrived_ms = 0;
  };
  const GradientWait& gradient_wait() const { return gradient_wait_; }

  // The last activity of run() before it ended or threw ("the backward"), and its layers.
  struct Doing {
    const char* what = "";
    schedule::Range layers;
  };
  const Doing& doing() const { return doing_; }

 private:
  using Tensors = std::vector<at::Tensor>;
  void forward(JobRun& run, int microbatch);
  void train(JobRun& run, int microbatch);
  bool nothing_to_do(const JobRun& run, int microbatch) const;
  std::vector<schedule::Range> segments(const JobRun& run) const;

  // Returns the outputs of one layer, without a graph.
  Flow run_layer(JobRun& run, int layer, const Flow& inputs, int microbatch, bool recompute, bool protect);
  SegmentGraph new_graph(JobRun& run, int microbatch);
  // Returns the gradients of a segment's inputs, given those of its outputs. Parameter gradients go to the sums.
  Tensors backpropagate(JobRun& run, schedule::Range segment, const Flow& inputs, const Tensors& gradients,
                        int microbatch);
  Tensors backpropagate_loss(JobRun& run, schedule::Range segment, Flow inputs, int microbatch);
  Tensors backpropagate_last(JobRun& run, schedule::Range segment, Flow inputs, int microbatch);
  void backward(JobRun& run, schedule::Range layers, int microbatch, bool from_loss, const Tensors& roots,
                const Tensors& gradients, BackwardClock* clock);
  // Undefined if the loss requires no gradient, as of rows without what is trained. Throws if none of the call does.
  at::Tensor total_loss(JobRun& run, const Values& outputs, int microbatch);

  device::Device& device_;
  DeviceRoom& room_;
  Outbox& outbox_;
  GradientSums& sums_;
  LayerRunner& layers_;

  Frugality frugality_ = Frugality::kStage;
  Doing doing_;
  GradientWait gradient_wait_;
};

}  // namespace roundpipe::runtime
