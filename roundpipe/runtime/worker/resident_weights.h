#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <roundpipe/core/mutex.h>
#include <roundpipe/core/residency.h>
#include <roundpipe/device/device.h>
#include <roundpipe/runtime/worker/job_queue.h>
#include <roundpipe/transfer/link_scheduler.h>

namespace roundpipe::runtime {

// Frozen weights that stay on one device from job to job, beside the weight slots, in memory that nothing else needs: a
// job whose block is resident does not upload it. A block is frozen for a call if no parameter of it requires gradients
// in that call.
//
// Which blocks have a copy is decided when jobs are submitted, by choose_residents(): only on a device with a cap, and
// not before each layer has run once, or the memory of the work is known from a prediction. Copies that are there come
// first, so a copy never gives way to another one that is wanted as often. Together they take what the device's spec
// allows, at most.
//
// A copy is used only if its fingerprint is that of the host's weights, taken for each submission over all bytes. Else
// the job uploads the block again: into the copy or, while an earlier job reads that, into a new one.
//
// When the device runs out of memory, give_way() frees all copies that no job reads, and from then on the device keeps
// half as many bytes at most. A job that has begun keeps its own copies, which take no more than its slot would have.
//
// Thread safety: any thread, unless said otherwise. The queue's lock is taken before this object's.
class ResidentWeights {
 public:
  // `worker`: its number, see ResidentCopies.
  ResidentWeights(device::Device& device, transfer::LinkScheduler& upload, JobQueue& queue, int worker)
      : device_(device), upload_(upload), queue_(queue), worker_(worker), most_bytes_(device.most_resident_bytes()) {}

  // Bytes beside weights that the device must keep free while `run` runs behind `before`.
  using Reserve = std::function<int64_t(const JobRun& run, const JobRun* before)>;
  // Chooses the copies for jobs that have just been put into the queue, those with JobRun::may_reside, and takes their
  // blocks out of the jobs' layouts. The thread that submits them.
  void choose(const Reserve& reserve) ROUNDPIPE_REQUIRES(queue_.mutex());
  // What all copies take, with those that are still to be filled.
  int64_t size_bytes() const;

  // The job has got its slot: submits what fills its copies, unless they hold its weights.
  void upload(const std::shared_ptr<JobRun>& run) ROUNDPIPE_REQUIRES(queue_.mutex());
  // All of them have arrived, and the job is about to begin. Uploads those again that a job which failed may have
  // written to meanwhile, and returns whether there are any. The device's thread.
  bool renew(const std::shared_ptr<JobRun>& run);
  // The job has failed, and what its layers have written is unknown. The device's thread.
  void doubt(const JobRun& run);
  // The job is over.
  void release(JobRun& run);

  // Frees the copies that no job reads, and halves the limit. Returns false if there was none.
  bool give_way();
  // Frees the copies of a job that has a slot and does not run yet, to be uploaded again. Returns whether there was
  // one. REQUIRES: its transfers that have begun are complete, so that it is the device's thread's.
  bool park(const std::shared_ptr<JobRun>& run);
  // Frees the copies that no job reads, for as long as no job wants them.
  void drop_idle();

 private:
  std::vector<FrozenBlock> frozen_blocks(const JobRun& run) const;
  void submit(const std::shared_ptr<JobRun>& run, size_t block, ResidentBlock& resident);
  // What is to be uploaded. The link's thread.
  std::vector<transfer::Piece> fill(JobRun& run, size_t block, ResidentBlock& resident);
  // The model's copy of a block, made if there is none.
  ResidentCopyPtr find(ModelState& model, size_t block) ROUNDPIPE_REQUIRES(mutex_);
  // It takes part in size_bytes() and give_way() from now on.
  void count(const ResidentCopyPtr& copy) ROUNDPIPE_REQUIRES(mutex_);
  // A new copy instead of it, which goes with the last job that reads it.
  ResidentCopyPtr replace(ModelState& model, size_t block) ROUNDPIPE_REQUIRES(mutex_);
  // Takes the memory off a copy that no job reads, to be dropped after the lock.
  void take_off(ResidentCopy& copy, std::vector<at::Tensor>& freed) ROUNDPIPE_REQUIRES(mutex_);
  std::vector<at::Tensor> free_idle() ROUNDPIPE_REQUIRES(mutex_);
  void forget_expired() ROUNDPIPE_REQUIRES(mutex_);

  device::Device& device_;
  transfer::LinkScheduler& upload_;
  JobQueue& queue_;
  const int worker_;
  mutable Mutex mutex_;
  std::vector<std::weak_ptr<ResidentCopy>> copies_ ROUNDPIPE_GUARDED_BY(mutex_);
  int64_t most_bytes_ ROUNDPIPE_GUARDED_BY(mutex_);  // below 0: no limit
  uint64_t submissions_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
};

}  // namespace roundpipe::runtime
