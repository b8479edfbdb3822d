#pragma once

#include <map>
#include <vector>

#include <roundpipe/device/device.h>
#include <roundpipe/runtime/autograd_nodes.h>
#include <roundpipe/runtime/flow.h>
#include <roundpipe/runtime/job_run.h>
#include <roundpipe/runtime/outbox.h>
#include <roundpipe/runtime/shells.h>
#include <roundpipe/transfer/link_scheduler.h>

namespace roundpipe::runtime {

// Runs single layers on one device as they would run in the uncut model: grad mode, random state, buffers, and
// whether a layer writes to its inputs. Used by the device's thread, inside its compute scope.
class LayerRunner {
 public:
  LayerRunner(device::Device& device, transfer::LinkScheduler& upload, Outbox& outbox, Shells& shells)
      : device_(device), upload_(upload), outbox_(outbox), shells_(shells) {}

  // Points the shells of the job's layers at its slot and sets what requires gradients.
  void bind(JobRun& run);
  // Lets go of the slot, so that its memory can be given up while it is idle. After bind(), also one that threw. Asks
  // nothing of the device, which may be lost.
  void unbind();

  // Runs one layer and drops the graph at once, so that only `requires_grad` of the outputs remains. Grad mode is on
  // when the call wants gradients: the kernels are then those of the recompute. `protect`: somebody else still reads
  // `inputs`, so a layer that writes to its inputs gets copies.
  Flow run_detached(JobRun& run, int layer, const Flow& inputs, int microbatch, bool recompute, bool protect);

  // Runs layers [first, last) with a graph that ends in `boundary`; `places[i]` is the index of input i there, -1 if
  // it needs no gradient, or is the same tensor as an input before it. `for_loss`: the loss takes the result.
  Values run_graph(JobRun& run, schedule::Range layers, const Flow& inputs, int microbatch, bool recompute,
                   bool for_loss, Boundary& boundary, std::vector<int>& places);

  Shell& shell(JobRun& run, int layer);

  // Gives the buffers of a layer that writes them what they held before this microbatch, if that is known.
  void restore_buffers(JobRun& run, int layer, int microbatch);

 private:
  // Notes what the device took from `begun` to `done`.
  void clock_forward(JobRun& run, int layer, const device::EventPtr& begun, const device::EventPtr& done);
  Values execute(JobRun& run, int layer, const Values& inputs, int microbatch, bool recompute);
  // The same, and finds out whether the layer writes to its inputs; `intact`: which of them it did not write to.
  // `needs_copies`: a layer that writes would have been given some as copies. Throws Error when it had never written.
  Values execute_watched(JobRun& run, int layer, const Values& inputs, int microbatch, bool recompute,
                         bool needs_copies, std::vector<char>& intact);
  // Of the places `wanted`, those that the layer is given as copies: none when it is known not to write.
  static std::vector<char> copies_for(const JobRun& run, int layer, const std::vector<char>& wanted);
  void save_buffers(JobRun& run, int layer, int microbatch, std::vector<at::Tensor> before);

  device::Device& device_;
  transfer::LinkScheduler& upload_;
  Outbox& outbox_;
  Shells& shells_;
  std::vector<LayerShell*> bound_;
  std::map<at::ScalarType, at::Tensor> nothing_;  // what an idle shell's tensors have
};

}  // namespace roundpipe::runtime
