#pragma once

#include <functional>
#include <vector>

#include <roundpipe/runtime/call/flow.h>
#include <roundpipe/runtime/call/job_run.h>
#include <roundpipe/transfer/link_scheduler.h>

namespace roundpipe::runtime {

// Sends what a job has computed to the host. Used by the device's thread, inside its compute scope; never blocks.
// Sending again what a microbatch has sent before (it ran out of memory after that and runs anew) does nothing.
class Outbox {
 public:
  Outbox(device::Device& device, transfer::LinkScheduler& download) : device_(device), download_(download) {}

  // A microbatch begins; `again`: after it has run out of memory.
  void begin_microbatch(bool again);

  // Moves what `begin` returns once all work issued so far is done. A failure fails the call.
  void send(JobRun& run, transfer::Priority priority, std::function<std::vector<transfer::Piece>()> begin,
            device::EventPtr done);
  // The same for pieces whose targets devices reach slowly: through page-locked memory, and from there on the thread
  // that settles the transfer. `done` fires when the targets have their values.
  void send_staged(JobRun& run, const std::vector<transfer::Piece>& pieces, const device::EventPtr& done);
  // The values before layer `boundary`, settled.
  void send_values(JobRun& run, const Flow& flow, int boundary, int microbatch);
  // Throws Error when they are sent again and are others: the caller may have gone on, and changed what they depend on.
  void send_losses(JobRun& run, const std::vector<at::Tensor>& losses, int microbatch);
  // The gradients of the job's inputs, settled, if anybody waits for them.
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
