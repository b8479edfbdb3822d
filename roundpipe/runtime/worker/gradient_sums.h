#pragma once

#include <deque>
#include <functional>
#include <vector>

#include <roundpipe/runtime/worker/device_room.h>
#include <roundpipe/runtime/worker/outbox.h>

namespace roundpipe::runtime {

// The parameter gradients of the job that runs on one device, summed there over its microbatches: one sum for each
// layer and block.
// Used by the device's thread, inside its compute scope.
class GradientSums {
 public:
  GradientSums(device::Device& device, transfer::LinkScheduler& upload, DeviceRoom& room, Outbox& outbox,
               LayerRunner& layers)
      : device_(device), upload_(upload), room_(room), outbox_(outbox), layers_(layers) {}

  // Makes room for the sums, with what earlier calls have left in them. Blocks until that is here.
  void begin(JobRun& run);
  // Gives what tied parameters got in this microbatch, and is not summed here, to the sums on the host; `ran`: whether
  // its backward did.
  void contribute_tied(JobRun& run, int microbatch, bool ran);
  // Sends the sums to the host and lets go of them.
  void send(JobRun& run);
  // Also after an error: nothing of the job stays on the device.
  void drop(JobRun& run);

  // A microbatch begins, or runs anew (`again`) after it had run out of memory: gradients that have come then are not
  // taken twice.
  void begin_microbatch(JobRun& run, bool again);
  // False when it could not be told what has come, as a layer runs backward passes of its own.
  bool can_run_again(JobRun& run);

 private:
  struct Sum {
    int layer;
    size_t block;
    memory::BlockLayout layout;
    at::Tensor flat;
  };
  static bool is_summed_here(const JobRun& run, int layer, size_t block);
  void begin_sum(JobRun& run, int layer, size_t block, std::vector<device::EventPtr>& arrived,
                 std::vector<std::function<void()>>& spread);
  at::Tensor allocate(int64_t size_bytes);

  device::Device& device_;
  transfer::LinkScheduler& upload_;
  DeviceRoom& room_;
  Outbox& outbox_;
  LayerRunner& layers_;
  std::deque<Sum> sums_;
};

}  // namespace roundpipe::runtime
