#pragma once

#include <map>
#include <vector>

#include <roundpipe/device/device.h>
#include <roundpipe/runtime/call/flow.h>
#include <roundpipe/runtime/call/job_run.h>
#include <roundpipe/runtime/worker/backward_clock.h>
#include <roundpipe/runtime/worker/outbox.h>
#include <roundpipe/torch_compat/autograd_nodes.h>
#include <roundpipe/transfer/link_scheduler.h>

namespace roundpipe::runtime {

// The graph of layers that have run together, and what its backward is timed with (null: it is not).
struct SegmentGraph {
  torch_compat::Boundary boundary;  // where it ends
  std::vector<int> places;  // of the inputs there; -1 for one that needs no gradient, or is an input before it again
  std::shared_ptr<BackwardClock> clock;

  // Of the inputs, after the backward; undefined where none arrived.
  std::vector<at::Tensor> input_gradients() const;
};

// Runs single layers on one device as they would run in the uncut model: grad mode, random state, buffers, and
// whether a layer writes to its inputs. Used by the device's thread, inside its compute scope.
class LayerRunner {
 public:
  LayerRunner(device::Device& device, transfer::LinkScheduler& upload, Outbox& outbox, int worker)
      : device_(device), upload_(upload), outbox_(outbox), worker_(worker) {}

  // While it lives, layers of a microbatch that run one after the other keep what Layer::hold() has given them, so
  // that it is taken once, and what they drop is dropped under it. Between them, pause() comes before whatever may wait
  // for another thread or takes a lock: that thread may want the same.
  class Together {
   public:
    Together(LayerRunner& layers, JobRun& run) : layers_(layers), run_(run) {}
    ~Together() { layers_.let_go(); }
    Together(const Together&) = delete;
    Together& operator=(const Together&) = delete;
    void pause() { layers_.pause(run_); }

   private:
    LayerRunner& layers_;
    JobRun& run_;
  };

  // Points the shells of the job's layers at its slot and sets what requires gradients.
  void bind(JobRun& run);
  // Lets go of the slot, so that its memory can be given up while it is idle. After bind(), also one that threw. Asks
  // nothing of the device, which may be lost.
  void unbind();

  // Runs one layer and drops the graph at once, so that only `requires_grad` of the outputs remains. Grad mode is on
  // when the call wants gradients: the kernels are then those of the recompute. `protect`: somebody else still reads
  // `inputs`, so a layer that writes to its inputs gets copies.
  Flow run_detached(JobRun& run, int layer, const Flow& inputs, int microbatch, bool recompute, bool protect);

  // Runs layers [first, last) with a graph. `for_loss`: the loss takes the result; else it has no structure.
  Values run_graph(JobRun& run, schedule::Range layers, const Flow& inputs, int microbatch, bool recompute,
                   bool for_loss, SegmentGraph& graph);

  Shell& shell(JobRun& run, int layer);

  // Gives the buffers of a layer that writes them what they held before this microbatch, if that is known.
  void restore_buffers(JobRun& run, int layer, int microbatch);

 private:
  // A layer's forward on the device, to be noted once it is over there.
  struct Clocked {
    int layer;
    device::EventPtr begun;
    device::EventPtr done;
  };

  // Holds what the layer holds, which the one before may have left; nothing where buffers make it wait.
  void hold(const JobRun& run, int layer);
  void let_go() noexcept;
  void pause(JobRun& run);
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
  const int worker_;  // its number in the pool
  std::vector<LayerShell*> bound_;
  std::shared_ptr<const void> held_;
  std::vector<Clocked> clocked_;
  std::map<at::ScalarType, at::Tensor> nothing_;  // what an idle shell's tensors have
};

}  // namespace roundpipe::runtime
