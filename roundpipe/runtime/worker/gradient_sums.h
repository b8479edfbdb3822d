#pragma once

#include <deque>
#include <functional>
#include <vector>

#include <roundpipe/runtime/worker/device_room.h>
#include <roundpipe/runtime/worker/outbox.h>

namespace roundpipe::runtime {

// The parameter gradients of the running job of one device, summed on the device over its microbatches: one sum for
// each layer and block. Each gradient group after the first one has a sum of its own. Sums of several groups, and those
// of layers that share a block, are added here if the job has them all, else on the host, in the same order (see
// BlockSum).
// Used by the device's thread, inside its compute scope.
class GradientSums {
 public:
  GradientSums(device::Device& device, transfer::LinkScheduler& upload, DeviceRoom& room, Outbox& outbox,
               LayerRunner& layers)
      : device_(device), upload_(upload), room_(room), outbox_(outbox), layers_(layers) {}

  // Allocates the sums, and starts that of the first group from the sums of earlier calls. Blocks until those are on
  // the device.
  void begin(JobRun& run);
  // Sends this microbatch's gradients of tied parameters that are not summed here to the sums on the host. `ran`:
  // whether the backward of the microbatch ran.
  void contribute_tied(JobRun& run, int microbatch, bool ran);
  // Ends the group of `microbatch` if that is the last one of a group, but not of the job.
  void end_group(JobRun& run, int microbatch);
  // The backward of a microbatch has passed the layers from `lowest` up. If it is the job's last one, sends their sums
  // to the host, unless their gradients may come late or the device has no memory for it right now.
  // By the thread of the backward, while the device's thread waits for it.
  void passed(JobRun& run, int microbatch, int lowest);
  // The backward of the layers from `lowest` up is over: sends likewise, and no gradient can come late.
  void over(JobRun& run, int microbatch, int lowest);
  // The backward of the microbatch is over: learns which layers' gradients came late.
  void learn(JobRun& run);
  // Sends the sums that are left to the host and drops them.
  void send(JobRun& run);
  // Drops the sums, also after an error: nothing of the job stays on the device.
  void drop(JobRun& run);

  // Begins a microbatch. `again`: it ran out of memory and runs again, so gradients that have already been taken are
  // not taken twice.
  void begin_microbatch(JobRun& run, bool again);
  // Returns false if a layer runs backward passes of its own, so that it is unknown which gradients have arrived.
  bool can_run_again(JobRun& run);

 private:
  struct Sum {
    int layer;
    size_t block;
    GradientSink* sink;  // of the layer's shell, also while the job is not bound
    memory::BlockLayout layout;
    at::Tensor flat;  // of the group, or of the first groups of a job that has only one part
    // Of the groups before, if the job begins with the first one; undefined at first.
    at::Tensor total;
    std::vector<char> in_total;  // per parameter of the block: whether it has a gradient there; empty at first
    // Of earlier calls, as the host has it, for a sum that others are added to before.
    memory::GradientBlockPtr base;
    at::Tensor base_flat;
    bool is_joined = false;  // the sums of all layers that share the block have been added
    bool has_left = false;   // or waits to be added to another layer's
  };
  static bool is_summed_here(const Call& call, size_t block);
  // Whether one job adds up the sums of all layers that share the block.
  static bool is_joined(const Call& call, size_t block);
  void begin_sum(JobRun& run, int layer, size_t block, std::vector<device::EventPtr>& arrived,
                 std::vector<std::function<void()>>& spread);
  void take_up(const JobRun& run, Sum& sum);
  void add_to_total(JobRun& run, Sum& sum);
  // Per parameter of the block: whether a gradient has come in this group.
  static std::vector<char> received(const JobRun& run, const Sum& sum);
  // Likewise, in any group and layer that the sum is of. REQUIRES: it is complete.
  static std::vector<char> complete(const JobRun& run, const Sum& sum);
  // The sum of its layer is complete: adds those of all layers that share the block to it. Returns false, and does
  // nothing, as long as another one is not.
  bool join(const JobRun& run, Sum& sum);
  // Sends the sum, from which the last gradient has come, if the device has memory for it.
  void send_early(JobRun& run, Sum& sum);
  // Ends the last group of the job, and sends. Returns false if the device has no memory for that and `may_wait` is
  // false.
  bool send_last(JobRun& run, Sum& sum, bool may_wait);
  bool send(JobRun& run, Sum& sum, schedule::Range groups, bool may_wait);
  // Undefined if there is no memory and `may_wait` is false.
  at::Tensor allocate(int64_t size_bytes, bool may_wait = true);

  device::Device& device_;
  transfer::LinkScheduler& upload_;
  DeviceRoom& room_;
  Outbox& outbox_;
  LayerRunner& layers_;
  std::deque<Sum> sums_;
};

}  // namespace roundpipe::runtime
