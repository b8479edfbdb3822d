#pragma once

#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include <roundpipe/device/device.h>
#include <roundpipe/runtime/call/flow.h>
#include <roundpipe/runtime/call/job_run.h>
#include <roundpipe/runtime/model/parameter_watch.h>
#include <roundpipe/runtime/worker/backward_clock.h>
#include <roundpipe/runtime/worker/outbox.h>
#include <roundpipe/runtime/worker/watch.h>
#include <roundpipe/torch_compat/autograd_nodes.h>
#include <roundpipe/transfer/link_scheduler.h>

namespace roundpipe::runtime {

// The graph of layers that have run together, and the clock that times its backward (null: not timed). As long as it
// lives, the backward calls `passed` (null: nobody asks), by its own thread, when it has passed all layers above one.
struct SegmentGraph {
  using Passed = std::function<void(int layer)>;
  torch_compat::Boundary boundary;  // where the graph ends at its inputs
  std::vector<int> places;  // per input, its index in `boundary`; -1: needs no gradient, or repeats an earlier input
  std::shared_ptr<BackwardClock> clock;
  std::shared_ptr<const Passed> passed;

  // After the backward: the gradients of the inputs, undefined where none arrived.
  std::vector<at::Tensor> input_gradients() const;
};

// Runs single layers on one device as they would run in the uncut model: with its grad mode, random state and buffers,
// and with copies of inputs that a layer writes to but others still read. Used by the device's thread, inside its
// compute scope.
class LayerRunner {
 public:
  LayerRunner(device::Device& device, transfer::LinkScheduler& upload, Outbox& outbox, Watch& watch, int worker)
      : device_(device), upload_(upload), outbox_(outbox), watch_(watch), worker_(worker) {}

  // While this object lives, layers of a microbatch that run one after the other keep the object that Layer::hold()
  // returned, so that it is taken only once and is still held when they drop values. Between layers, call pause()
  // before anything that may wait for another thread or takes a lock: that thread may want the same.
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

  int worker() const { return worker_; }

  // Before the job's first microbatch, once the upload of its weights has begun: binds. A layer waits for its own
  // weights when it first runs.
  void begin(JobRun& run);
  // When the job is over, or begin() threw.
  void end();
  // Points the shells of the job's layers at its slot and its resident weights, and sets which parameters require
  // gradients.
  void bind(JobRun& run);
  // Detaches the shells from the slot, so that its memory can be freed while it is idle. Also after a bind() that
  // threw. Makes no call to the device, which may be lost.
  void unbind();

  // Runs one layer and drops the graph at once; only `requires_grad` of the outputs remains of it. Grad mode is on if
  // the call wants gradients, so that the kernels are those of the recompute. `protect`: something else still reads
  // `inputs`, so a layer that writes to its inputs gets copies.
  Flow run_detached(JobRun& run, int layer, const Flow& inputs, int microbatch, bool recompute, bool protect);

  // Runs `layers` with a graph. `for_loss`: the loss takes the result; otherwise the result has no structure, and of
  // the last layer's outputs only the graph, shapes and dtypes count (LayerContext::outputs_are_read).
  Values run_graph(JobRun& run, schedule::Range layers, const Flow& inputs, int microbatch, bool recompute,
                   bool for_loss, SegmentGraph& graph);

  // The shell of one of the job's layers. REQUIRES: the job is bound.
  Shell& shell(const JobRun& run, int layer) const { return *bound_.at(run.place(layer)); }

  // A wait for weights: when the device had nothing to do, and the event that ended it.
  using Wait = std::pair<device::EventPtr, device::EventPtr>;
  // Those since the last call.
  std::vector<Wait> take_waits() { return std::exchange(waits_, {}); }

  // Restores the buffers of a layer that writes them to their values before this microbatch, if these were saved.
  // Blocks until they are uploaded.
  void restore_buffers(JobRun& run, int layer, int microbatch);

 private:
  // A layer's forward on the device, recorded once it has finished there.
  struct Clocked {
    int layer;
    int64_t output_bytes;
    device::EventPtr begun;
    device::EventPtr done;
  };

  // Keeps the result of the layer's Layer::hold(), or the one that the layer before left. Keeps nothing if the layer
  // has buffers, since their transfers may block.
  void hold(const JobRun& run, int layer);
  void let_go() noexcept;
  void pause(JobRun& run);
  // How a layer's forward is used.
  struct Use {
    bool recompute = false;
    bool outputs_are_read = true;
  };
  Values execute(JobRun& run, int layer, const Values& inputs, int microbatch, Use use);
  // Before the first time that the job runs the layer: waits for its weights, and remembers of them what tells whether
  // it writes them.
  void await_weights(JobRun& run, int layer);
  // After a forward of the layer: throws std::invalid_argument if it has written its weights, and Error if it may have
  // and nothing was remembered of them.
  void look_at_weights(JobRun& run, int layer, int microbatch);
  // The same, and learns whether the layer writes to its inputs. `intact`: per input, whether it was not written to.
  // `needs_copies`: a layer known to write would have been given copies. Throws Error if they were needed and the
  // layer, which had run without writing before, has written.
  Values execute_watched(JobRun& run, int layer, const Values& inputs, int microbatch, Use use, bool needs_copies,
                         std::vector<char>& intact);
  // The inputs, among the `wanted` ones, that the layer is given as copies: none if it is known not to write.
  static std::vector<char> copies_for(const JobRun& run, int layer, const std::vector<char>& wanted);
  void save_buffers(JobRun& run, int layer, int microbatch, std::vector<at::Tensor> before);

  device::Device& device_;
  transfer::LinkScheduler& upload_;
  Outbox& outbox_;
  Watch& watch_;
  const int worker_;                                    // its number in the pool
  std::vector<Shell*> bound_;                           // of the job's layers, in order
  std::vector<std::optional<ParameterWatch>> watches_;  // likewise; empty until its weights are awaited
  std::vector<Wait> waits_;
  std::shared_ptr<const void> held_;
  std::vector<Clocked> clocked_;
  std::map<at::ScalarType, at::Tensor> nothing_;  // empty tensors for idle shells, by dtype
};

}  // namespace roundpipe::runtime
