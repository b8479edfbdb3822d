#pragma once

#include <memory>
#include <vector>

#include <roundpipe/memory/weight_slots.h>
#include <roundpipe/runtime/worker/job_queue.h>
#include <roundpipe/runtime/worker/layer_runner.h>
#include <roundpipe/runtime/worker/resident_weights.h>
#include <roundpipe/runtime/worker/staging.h>
#include <roundpipe/runtime/worker/watch.h>

namespace roundpipe::runtime {

// One device's memory, and which job may use it: weights in two slots, frozen ones that stay, staged values, and
// results on their way out. While one job runs, the weights and first inputs of the next are prefetched. When the
// running job runs out of memory, it gets the memory of others: first that of results which have left and of frozen
// weights that it does not read, then that of everything prefetched, which is evicted to the host.
//
// Thread safety: the device's thread inside its compute scope, unless said otherwise.
class DeviceRoom {
 public:
  DeviceRoom(device::Device& device, JobQueue& queue, transfer::LinkScheduler& upload,
             transfer::LinkScheduler& download, LayerRunner& layers, Watch& watch)
      : device_(device),
        queue_(queue),
        upload_(upload),
        download_(download),
        layers_(layers),
        watch_(watch),
        slots_(device),
        residents_(device, upload, queue, layers.worker()),
        staging_(device, upload, queue) {}

  device::Device& device() { return device_; }
  transfer::LinkScheduler& upload() { return upload_; }

  // Called after jobs have been put into the queue: sizes the slots for them, and prefetches. Any thread.
  void enqueued() ROUNDPIPE_REQUIRES(queue_.mutex());
  // Frees the device memory kept for later jobs. Any thread.
  void trim() {
    slots_.drop_idle();
    residents_.drop_idle();
  }
  // Bytes of frozen weights that stay on the device. Any thread.
  int64_t resident_bytes() const { return residents_.size_bytes(); }

  // Submits the uploads of everything that microbatch `microbatch` of the running job reads. A second call does
  // nothing.
  void stage(JobRun& run, int microbatch) { staging_.stage(run, microbatch); }
  // Drops the uploaded values of the microbatch and uploads them once more. REQUIRES: the transfers that have begun are
  // complete.
  void stage_again(JobRun& run, int microbatch) { staging_.stage_again(run, microbatch); }
  // The running job is far enough that `count` microbatches of the next one may be staged.
  void stage_next(int count);

  // Blocks until the transfer that fires `done` is complete, and makes room for it if it found no memory. Throws its
  // error.
  void arrive(const device::EventPtr& done) { arrive(done, done); }
  // The same for `part`, which completes with a piece of that transfer.
  void arrive(const device::EventPtr& done, const device::EventPtr& part);
  // The same for the running job's resident weights.
  void arrive_residents(const std::shared_ptr<JobRun>& run);
  // The same, then returns what was uploaded: the inputs of a staged microbatch, or the staged values (undefined where
  // there is none).
  Flow take(JobRun& run, int microbatch);
  std::vector<at::Tensor> take(StagedValues& staged);

  // Evicts everything that the running job can do without: waits for results on their way out and frees the frozen
  // weights that no job reads; if there were none, moves prefetched weights back to the host and drops prefetched
  // inputs, to upload both again. Returns false if there was nothing to evict.
  bool make_room();

  // When the running job's weights may be moved, for which its layers are unbound and bound again. Never while a
  // microbatch runs, since its graph refers to the weights. Later while the error that a microbatch threw is alive,
  // since it may refer to them as well.
  enum class Moving { kNow, kLater, kNever };
  void weights_may_move(Moving moving) { moving_ = moving; }

  // Removes the running job from the queue; its compute has been issued. The slot is released once the job's compute
  // and transfers are complete. Not inside the compute scope.
  void release(const std::shared_ptr<JobRun>& run);

 private:
  // Starts all uploads that can start for the running and the next job. Any thread.
  void prefetch() ROUNDPIPE_REQUIRES(queue_.mutex());
  void upload_weights(const std::shared_ptr<JobRun>& run);
  std::vector<transfer::Piece> weight_pieces(JobRun& run);
  void stage_first(JobRun& run, int count);
  // Bytes to keep free under the cap, beside the weights of `run` and of `before`, the job before it (null: that job is
  // gone), and beside resident ones.
  int64_t work_bytes(const JobRun& run, const JobRun* before) const;
  // The same, with room for resident weights.
  int64_t reserve_bytes(const JobRun& run, const JobRun* before) const {
    return work_bytes(run, before) + residents_.size_bytes();
  }
  bool park_next();
  // Moves the weights of a job to the host, so that their device memory can be freed. Returns false if the host has no
  // memory for them. REQUIRES: they are on the device.
  bool park_weights(const std::shared_ptr<JobRun>& run);
  // Uploads them again.
  void unpark_weights(const std::shared_ptr<JobRun>& run);
  // Moves the running job's weights, too, out of the arena that both slots share, so that the arena is freed. Happens
  // once per device: its slots are separate from then on. Returns true if they now are, or if a later call can do it
  // (Moving::kLater). Returns false if they already were, or if the weights must not be moved now.
  bool leave_arena(const std::shared_ptr<JobRun>& running);

  device::Device& device_;
  JobQueue& queue_;
  transfer::LinkScheduler& upload_;
  transfer::LinkScheduler& download_;
  LayerRunner& layers_;
  Watch& watch_;
  memory::WeightSlots slots_;
  ResidentWeights residents_;
  Staging staging_;
  Moving moving_ = Moving::kNow;
};

}  // namespace roundpipe::runtime
