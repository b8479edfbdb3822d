#pragma once

#include <memory>
#include <vector>

#include <roundpipe/memory/weight_slots.h>
#include <roundpipe/runtime/worker/job_queue.h>
#include <roundpipe/runtime/worker/layer_runner.h>
#include <roundpipe/runtime/worker/staging.h>

namespace roundpipe::runtime {

// One device's memory, and which job may have it: weights in two slots, staged values, and results on their way out.
// The weights and first inputs of the next job are prefetched while one runs. When the running job runs out of memory,
// it gets what others hold: results that have left, then all that has been prefetched, which goes back to the host.
//
// Thread safety: the device's thread inside its compute scope, unless said otherwise.
class DeviceRoom {
 public:
  DeviceRoom(device::Device& device, JobQueue& queue, transfer::LinkScheduler& upload,
             transfer::LinkScheduler& download, LayerRunner& layers)
      : device_(device),
        queue_(queue),
        upload_(upload),
        download_(download),
        layers_(layers),
        slots_(device),
        staging_(device, upload, queue) {}

  device::Device& device() { return device_; }
  transfer::LinkScheduler& upload() { return upload_; }

  // Jobs have been put into the queue: sizes the slots for them, and prefetches. Any thread.
  void enqueued() ROUNDPIPE_REQUIRES(queue_.mutex());
  // Gives back what the device keeps for later jobs. Any thread.
  void trim() { slots_.drop_idle(); }

  // Asks for everything that microbatch `microbatch` of the running job reads, once.
  void stage(JobRun& run, int microbatch) { staging_.stage(run, microbatch); }
  // Drops what has come for it and asks once more. REQUIRES: the transfers that have begun are complete.
  void stage_again(JobRun& run, int microbatch) { staging_.stage_again(run, microbatch); }
  // The running job has come so far that `count` microbatches of the next one may be staged.
  void stage_next(int count);

  // Blocks until the transfer that fires `done` is over, making room for it where there is none; throws its error.
  void arrive(const device::EventPtr& done);
  // The same, and what has come: the inputs of a staged microbatch; staged values, undefined where none came.
  Flow take(JobRun& run, int microbatch);
  std::vector<at::Tensor> take(StagedValues& staged);

  // Evicts what the running job can do without: waits for what is on its way out, then moves what has been prefetched
  // back to the host. False when there was neither.
  bool make_room();

  // When the running job's weights may be moved, for which its layers are unbound and bound again: not while a
  // microbatch runs, whose graph holds on to them; and what it threw does, too, until it runs again.
  enum class Moving { kNow, kLater, kNever };
  void weights_may_move(Moving moving) { moving_ = moving; }

  // The running job's compute has been issued; it leaves the queue, and its slot is free once nothing of it is on its
  // way. Not inside the compute scope.
  void release(const std::shared_ptr<JobRun>& run);

  // How many microbatches are staged at a time, across the end of a job: the one that runs and two ahead.
  static constexpr int kStaged = 3;

 private:
  // Starts what can be started for the running and the next job. Any thread.
  void prefetch() ROUNDPIPE_REQUIRES(queue_.mutex());
  void upload_weights(const std::shared_ptr<JobRun>& run);
  std::vector<transfer::Piece> weight_pieces(JobRun& run);
  void stage_first(JobRun& run, int count);
  // What is to be left under the cap beside the weights of `run`, and of the job before it if that is still there.
  int64_t reserve_bytes(const JobRun& run, const JobRun* before) const;
  bool park_next();
  // Moves the weights of a job to the host, so that their memory can be dropped; false when the host has none for
  // them. REQUIRES: they are on the device.
  bool park_weights(const std::shared_ptr<JobRun>& run);
  // Asks for them again.
  void unpark_weights(const std::shared_ptr<JobRun>& run);
  // Moves the running job's weights out of the arena that holds the next job's place, too, so that the arena goes. Once
  // for a device: its slots are separate from then on. False when they were, or when this is not the moment; true, too,
  // when it may be later and is to be asked again.
  bool leave_arena(const std::shared_ptr<JobRun>& running);

  device::Device& device_;
  JobQueue& queue_;
  transfer::LinkScheduler& upload_;
  transfer::LinkScheduler& download_;
  LayerRunner& layers_;
  memory::WeightSlots slots_;
  Staging staging_;
  Moving moving_ = Moving::kNow;
};

}  // namespace roundpipe::runtime
