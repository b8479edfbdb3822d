#pragma once

#include <functional>

#include <roundpipe/runtime/call/flow.h>
#include <roundpipe/runtime/call/job_run.h>
#include <roundpipe/transfer/link_scheduler.h>

namespace roundpipe::runtime {

// Brings what the microbatches of jobs read to one device.
//
// `admit` is called on the link's thread before a transfer takes device memory, and may throw c10::OutOfMemoryError to
// put it aside. `make_room` is called on the device's thread when there is none left: true when it has given some up.
class Staging {
 public:
  using Admit = std::function<void(const JobRun& run, const device::EventPtr& done)>;
  using MakeRoom = std::function<bool()>;
  Staging(device::Device& device, transfer::LinkScheduler& upload, Admit admit, MakeRoom make_room)
      : device_(device), upload_(upload), admit_(std::move(admit)), make_room_(std::move(make_room)) {}

  // Asks for everything that microbatch `microbatch` of the job reads. Any thread; once per microbatch.
  void stage(JobRun& run, int microbatch);
  // Gives up what lies on the device for a microbatch and asks for it once more. REQUIRES: the transfers that have
  // begun are complete.
  void stage_again(JobRun& run, int microbatch);

  // The inputs of a staged microbatch; blocks until they are here. Device's thread.
  Flow take(JobRun& run, int microbatch);
  // What uploads of `staged` have brought, with broadcast dimensions put back: undefined where nothing came. Blocks
  // until they are here. Device's thread.
  std::vector<at::Tensor> take(StagedValues& staged);

  // Blocks until the transfer that fires `done` is over, making room for it where there is none; throws its error.
  void arrive(const device::EventPtr& done);
  // Gives up what can do without device memory for now; true when that was anything. Device's thread.
  bool make_room() { return make_room_(); }

 private:
  void upload(JobRun& run, transfer::Priority priority, device::EventPtr after,
              const std::shared_ptr<StagedValues>& values, std::function<void(StagedValues&)> fill,
              std::function<void()> filled);
  at::Tensor usable(const memory::HostValue& value, const at::Tensor& uploaded);

  device::Device& device_;
  transfer::LinkScheduler& upload_;
  const Admit admit_;
  const MakeRoom make_room_;
};

}  // namespace roundpipe::runtime
