#pragma once

#include <deque>
#include <vector>

#include <roundpipe/runtime/layer_runner.h>

namespace roundpipe::runtime {

// Executes jobs on one device: takes staged values, runs forward, fused or backward, and hands results to the
// download link. Used by the device's thread, inside its compute scope and the call's thread-local state.
// What a layer, the loss or a transfer throws leaves run(); the caller fails the call with it.
class JobRunner {
 public:
  JobRunner(int index, device::Device& device, transfer::LinkScheduler& upload, transfer::LinkScheduler& download,
            Shells& shells);

  // Asks for everything that microbatch `microbatch` of the job reads. Any thread; once per microbatch.
  void stage(JobRun& run, int microbatch);

  // REQUIRES: run.weights are uploaded; stage() has been asked for the first kPrefetch microbatches.
  void run(JobRun& run);

  // How many microbatches are staged ahead of the one that runs.
  static constexpr int kPrefetch = 2;

 private:
  Flow take(JobRun& run, int microbatch);
  void forward(JobRun& run, int microbatch);
  // Fused and backward jobs.
  void train(JobRun& run, int microbatch);
  // Runs the backward of `layers` (and of the loss, in a fused job) from `roots`, if there are any.
  void backward(JobRun& run, schedule::Range layers, const std::vector<at::Tensor>& roots,
                const std::vector<at::Tensor>& gradients);
  void backpropagate_loss(JobRun& run, schedule::Range layers, const Values& outputs, int microbatch);
  bool nothing_to_do(const JobRun& run, int microbatch) const;

  void begin_gradients(JobRun& run);
  void contribute_tied(JobRun& run, int microbatch, bool ran);
  void send_gradients(JobRun& run);

  void send_values(JobRun& run, const Flow& flow, int boundary, int microbatch);
  void send_input_gradients(JobRun& run, int microbatch, std::vector<at::Tensor> gradients);
  void send(JobRun& run, transfer::Priority priority, std::function<std::vector<transfer::Piece>()> begin,
            device::EventPtr done);
  void limit_run_ahead(JobRun& run, int microbatch, double start_ms);

  const int index_;
  device::Device& device_;
  transfer::LinkScheduler& upload_;
  transfer::LinkScheduler& download_;
  LayerRunner layers_;

  // The gradients of one block, summed on the device over the running job's microbatches.
  struct GradientSum {
    int layer;
    size_t block;
    memory::BlockLayout layout;
    at::Tensor flat;
  };
  // Also after an error: nothing of the job stays on the device.
  void drop_sums(JobRun& run);
  void begin_sum(JobRun& run, int layer, size_t block, std::vector<device::EventPtr>& arrived,
                 std::vector<std::function<void()>>& spread);

  std::deque<GradientSum> sums_;
  std::deque<device::EventPtr> launched_;
  // Of the microbatch that runs, see ExecutionRecord.
  double recomputed_ms_ = 0;
  double waited_ms_ = 0;
};

}  // namespace roundpipe::runtime
