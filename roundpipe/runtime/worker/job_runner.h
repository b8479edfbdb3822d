#pragma once

#include <deque>
#include <string>

#include <roundpipe/runtime/worker/microbatch_runner.h>

namespace roundpipe::runtime {

// Executes jobs on one device: takes staged values, runs forward, fused or backward, and sends results to the download
// link. Used by the device's thread, inside its compute scope and the call's thread-local state.
//
// A microbatch that runs out of memory runs again: first after room has been made, then layer by layer. The layers
// remember how frugally they had to run. Other errors of a layer, the loss or a transfer leave run(), and so does an
// out-of-memory error that no retry could cure; the caller fails the call with it. If memory ran out, run() first
// records where, see Call::ran_out.
class JobRunner {
 public:
  // The arguments outlive this.
  JobRunner(int index, DeviceRoom& room, Outbox& outbox, LayerRunner& layers, Watch& watch);

  // REQUIRES: the upload of run.weights has been submitted.
  void run(JobRun& run);

 private:
  void run_job(JobRun& run);
  void run_microbatch(JobRun& run, int microbatch);
  // Prepares for running the microbatch again. Returns false if nothing is left to try; `tried_` then says why.
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
  Watch& watch_;
  GradientSums sums_;
  MicrobatchRunner microbatches_;
  // Of the running job, for full_device().
  MicrobatchRunner::Doing doing_;
  int microbatch_ = -1;
  std::string tried_;

  std::deque<device::EventPtr> launched_;
};

}  // namespace roundpipe::runtime
