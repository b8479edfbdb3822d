#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <roundpipe/runtime/call/flow.h>
#include <roundpipe/runtime/worker/job_queue.h>
#include <roundpipe/transfer/link_scheduler.h>

namespace roundpipe::runtime {

// Uploads the values that the microbatches of jobs read to one device. A transfer asks the job queue before it takes
// memory.
class Staging {
 public:
  Staging(device::Device& device, transfer::LinkScheduler& upload, JobQueue& queue)
      : device_(device), upload_(upload), queue_(queue) {}

  // Submits the uploads of everything that microbatch `microbatch` of the job reads. A second call does nothing. The
  // device's thread for the running job; any thread, with the queue's lock held, for a job that waits.
  void stage(JobRun& run, int microbatch);
  // Drops the uploaded values of a microbatch and uploads them once more. REQUIRES: the transfers that have begun are
  // complete.
  void stage_again(JobRun& run, int microbatch);

  // The inputs of a staged microbatch. Device's thread. REQUIRES: they have arrived.
  Flow take(JobRun& run, int microbatch);
  // The uploaded values of `staged`, with broadcast dimensions restored; undefined where there is none. Device's
  // thread. REQUIRES: they have arrived.
  std::vector<at::Tensor> take(StagedValues& staged);

 private:
  void upload(JobRun& run, transfer::Priority priority, const device::EventPtr& after,
              const std::shared_ptr<StagedValues>& values, std::function<void(StagedValues&)> fill,
              std::function<void()> filled);
  at::Tensor usable(const memory::HostValue& value, const at::Tensor& uploaded);

  device::Device& device_;
  transfer::LinkScheduler& upload_;
  JobQueue& queue_;
};

}  // namespace roundpipe::runtime
