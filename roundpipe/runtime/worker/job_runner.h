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
  JobRunner(int index, device::Device& device, transfer::LinkScheduler& upload, transfer::LinkScheduler& download,
            Shells& shells, Staging::Admit admit, Staging::MakeRoom make_room, std::function<void(int)> stage_next);

  // See Staging: for jobs that run, and for those that are next.
  Staging& staging() { return staging_; }

  // REQUIRES: run.weights have been asked for. Calls `stage_next` with how many microbatches of the next job may be
  // staged by now.
  void run(JobRun& run);

  // When the running job's weights may be moved, for which its layers let go of them and are pointed at them anew. Not
  // while a microbatch runs, whose graph holds on to them; and what it threw does, too, until it runs anew.
  enum class Moving { kNow, kLater, kNever };
  Moving moving() const { return moving_; }
  // REQUIRES: moving() is kNow.
  void unbind() { layers_.unbind(); }
  void bind(JobRun& run) { layers_.bind(run); }

  // How many microbatches are staged at a time, across the end of a job: the one that runs and two ahead.
  static constexpr int kStaged = 3;

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
  Outbox outbox_;
  Staging staging_;
  LayerRunner layers_;
  GradientSums sums_;
  MicrobatchRunner microbatches_;
  const std::function<void(int)> stage_next_;

  // Of the running job, for full_device().
  MicrobatchRunner::Doing doing_;
  int microbatch_ = -1;
  std::string tried_;
  Moving moving_ = Moving::kNow;

  std::deque<device::EventPtr> launched_;
};

}  // namespace roundpipe::runtime
