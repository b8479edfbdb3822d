#pragma once

#include <functional>
#include <vector>

#include <roundpipe/runtime/call/flow.h>
#include <roundpipe/runtime/call/job_run.h>
#include <roundpipe/transfer/link_scheduler.h>

namespace roundpipe::runtime {

// Sends the results of a job to the host. Used by the device's thread, inside its compute scope; never blocks.
// A microbatch that ran out of memory after it had sent values or losses does not send them a second time when it runs
// again.
class Outbox {
 public:
  Outbox(device::Device& device, transfer::LinkScheduler& download) : device_(device), download_(download) {}

  // Begins a microbatch. `again`: it ran out of memory and runs again.
  void begin_microbatch(bool again);

  // Transfers the pieces that `begin` returns, once all work issued so far is done and `room` has fired (null: at
  // once). A failure fails the attempt.
  void send(JobRun& run, transfer::Priority priority, std::function<std::vector<transfer::Piece>()> begin,
            device::EventPtr done, const device::EventPtr& room = nullptr);
  // Sends the values that a layer's buffers have now, for `targets`, and fires `written` when they have them: as soon
  // as the values are on the host or, in a call that is fault tolerant, when the job is over.
  void send_buffers(JobRun& run, int layer, std::vector<at::Tensor> targets, const std::vector<at::Tensor>& values,
                    const device::EventPtr& written);
  // Sends the values before layer `boundary`, which are settled (memory::settled).
  void send_values(JobRun& run, const Flow& flow, int boundary, int microbatch);
  // Sends the losses. Throws Error if they were sent before and now differ: the caller may already have acted on them.
  void send_losses(JobRun& run, const std::vector<at::Tensor>& losses, int microbatch);
  // Sends the gradients of the job's inputs, settled, if anything waits for them.
  void send_input_gradients(JobRun& run, int microbatch, std::vector<at::Tensor> gradients);

 private:
  bool sent_before(int what);

  device::Device& device_;
  transfer::LinkScheduler& download_;
  // Of the running microbatch.
  std::vector<int> sent_;
  std::vector<at::Tensor> losses_;
};

}  // namespace roundpipe::runtime
