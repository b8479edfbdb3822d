#pragma once

#include <deque>
#include <string>

#include <roundpipe/runtime/worker/microbatch_runner.h>

namespace roundpipe::runtime {

// Executes jobs on one device: takes staged values, runs forward, fused or backward, and hands results to the
// download link. Used by the device's thread, inside its compute scope and the call's thread-local state.
//
// A microbatch that runs out of memory runs anew: first after room has been made, then layer by layer; the layers
// remember how far that had to go. What a layer, the loss or a transfer throws otherwise, and what is left when nothing
// helps, leaves run(); the caller fails the call with it. A call that a device had no memory for knows where, see
// Call::ran_out.
class JobRunner {
 public:
  // What is handed in outlives this.
  JobRunner(int index, DeviceRoom& room, Outbox& outbox, LayerRunner& layers);

  // REQUIRES: run.weights have been asked for.
  void run(JobRun& run);

 private:
  void run_job(JobRun& run);
  void run_microbatch(JobRun& run, int microbatch);
  // Prepares for running the microbatch anew; false, and `tried_` says why, when nothing is left to try.
  bool prepare_again(JobRun& run, int microbatch, Frugality& frugality);
  FullDevice full_device(const JobRun& run) const;
  void hand_on_buffers(JobRun& run);
  void record(JobRun& run, int microbatch, const device::EventPtr& begun, const device::EventPtr& done);
  void limit_run_ahead(device::EventPtr done);

  const int index_;
  device::Device& device_;
  DeviceRoom& room_;
  Outbox& outbox_;
  LayerRunner& layers_;
  GradientSums sums_;
  MicrobatchRunner microbatches_;
  // Of the running job, for full_device().
  MicrobatchRunner::Doing doing_;
  int microbatch_ = -1;
  std::string tried_;

  std::deque<device::EventPtr> launched_;
};

}  // namespace roundpipe::runtime
