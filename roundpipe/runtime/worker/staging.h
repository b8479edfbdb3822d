#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <roundpipe/runtime/call/flow.h>
#include <roundpipe/runtime/worker/job_queue.h>
#include <roundpipe/transfer/link_scheduler.h>

namespace roundpipe::runtime {

// Uploads what the microbatches of jobs read to one device. A transfer asks the job queue before it takes memory.
class Staging {
 public:
  Staging(device::Device& device, transfer::LinkScheduler& upload, JobQueue& queue)
      : device_(device), upload_(upload), queue_(queue) {}

  // Asks for everything that microbatch `microbatch` of the job reads. Any thread; once per microbatch.
  void stage(JobRun& run, int microbatch);
  // Drops what lies on the device for a microbatch and asks for it once more. REQUIRES: the transfers that have begun
  // are complete.
  void stage_again(JobRun& run, int microbatch);

  // The inputs of a staged microbatch. Device's thread. REQUIRES: they have arrived.
  Flow take(JobRun& run, int microbatch);
  // What uploads of `staged` have brought, with broadcast dimensions put back: undefined where nothing came. Device's
  // thread. REQUIRES: they have arrived.
  std::vector<at::Tensor> take(StagedValues& staged);

 private:
  void upload(JobRun& run, transfer::Priority priority, device::EventPtr after,
              const std::shared_ptr<StagedValues>& values, std::function<void(StagedValues&)> fill,
              std::function<void()> filled);
  at::Tensor usable(const memory::HostValue& value, const at::Tensor& uploaded);

  device::Device& device_;
  transfer::LinkScheduler& upload_;
  JobQueue& queue_;
};

}  // namespace roundpipe::runtime
