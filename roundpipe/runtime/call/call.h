#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include <ATen/ThreadLocalState.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/device/event_list.h>
#include <roundpipe/memory/host_value.h>
#include <roundpipe/runtime/call/block_sum.h>
#include <roundpipe/runtime/call/execution_log.h>
#include <roundpipe/runtime/call/run_options.h>
#include <roundpipe/runtime/model/layer.h>
#include <roundpipe/runtime/model/model_state.h>
#include <roundpipe/runtime/model/out_of_memory.h>
#include <roundpipe/runtime/model/random.h>
#include <roundpipe/schedule/gradient_groups.h>
#include <roundpipe/schedule/plan.h>

namespace roundpipe::runtime {

struct HostFingerprint;

// One microbatch's values between two layers, on the host. Readable once `produced` has fired.
struct BoundaryValues {
  std::vector<memory::HostValuePtr> tensors;  // the same pointer twice = the same tensor twice
  std::shared_ptr<const void> structure;
  device::EventPtr produced;
  std::atomic<int> readers{0};  // uploads that have not begun; at 0 the host memory is released
};

// One microbatch's gradients at a boundary, aligned with BoundaryValues::tensors; undefined = none.
struct BoundaryGradients {
  std::vector<at::Tensor> tensors;
  device::EventPtr produced;
};

// What a front end asks of a call beside the user's options.
struct CallTerms {
  // A NaN loss is an error, unless a scaler of losses belongs to the model. It is found when the caller takes the
  // losses or, with `early`, on the device, before its gradients are used; there, a loss that was scaled is none,
  // either.
  bool refuses_nan = false;
  bool refuses_nan_early = false;
  // The call reads something that the caller may change, so it returns only after the last read.
  bool keeps_caller = false;
  // See Call::keep_step; may be null. A call's own terms have none.
  std::shared_ptr<const StepNote> step = nullptr;
};

// The caller's autocast settings, to be applied on workers.
struct AutocastState {
  static AutocastState capture(c10::DeviceType accelerator);
  void apply() const;
  struct Entry {
    c10::DeviceType device_type;
    bool enabled;
    at::ScalarType dtype;
  };
  std::vector<Entry> entries;
};

// One pipelined run of a model over a batch: inputs in, outputs or losses out, gradients left on the host.
//
// Shared by the caller, the workers and pending transfers. Every event that others wait for is made by new_event(), so
// fail() releases all waiters: the first error wins, remaining jobs are skipped, and `finished` still fires.
// Thread safety: methods from any thread; members are grouped by who may touch them.
class Call : public std::enable_shared_from_this<Call> {
 public:
  // `options.microbatches` and `options.requires_grad` are those of the call itself; unset: 1, and true.
  Call(std::shared_ptr<ModelState> model, RunOptions options, CallTerms terms, uint64_t id, uint64_t index,
       uint64_t base_seed);
  // Tells the frontend that the call is over.
  ~Call();

  device::EventPtr new_event();
  void fail(std::exception_ptr error);
  std::exception_ptr error() const;
  bool failed() const { return failed_.load(); }

  // Runs `callback` once all of `events` have fired. If an event fails, or the callback throws, the call fails with
  // that error. So an event that the callback fires is always completed, by the callback or by the call's failure. Null
  // events count as fired. Use this for all work of a call that waits for an event.
  void then(const std::vector<device::EventPtr>& events, device::Event::Callback callback);
  // Runs `work` now. Returns whether it succeeded; an error fails the call.
  bool attempt(const std::function<void()>& work) noexcept;

  // Counts jobs that are submitted and not yet over, including their transfers; `finished` fires at 0.
  void add_jobs(int count);
  void job_over();
  device::EventPtr finished() const;
  // Returns an object that counts as a job until it is dropped. REQUIRES: a job is left, or is about to be added.
  std::shared_ptr<void> hold();

  // How gradients are summed over the microbatches.
  schedule::GradientGroups groups() const { return {microbatches, options.gradient_groups}; }

  BoundaryValues& values(int layer, int microbatch) { return values_[at(layer, microbatch)]; }
  BoundaryGradients& gradients(int layer, int microbatch) { return gradients_[at(layer, microbatch)]; }

  void record(const ExecutionRecord& record) { log->add(record); }
  std::vector<ExecutionRecord> records() const { return log->records(); }

  // Outlives the call, for those who only read its records.
  const std::shared_ptr<ExecutionLog> log = std::make_shared<ExecutionLog>();

  const std::shared_ptr<ModelState> model;
  const RunOptions options;
  const CallTerms terms;
  const int microbatches;
  const bool requires_grad;
  const uint64_t id;     // unique in the process
  const uint64_t index;  // among this model's calls; keys the random state
  const uint64_t base_seed;

  // Caller's thread only.
  bool committed = false;                  // see Pipeline::commit_calls
  std::vector<uint32_t> parameter_writes;  // [parameter of all blocks]: how often it had been written to
  // Of the current submission, [block]: null if nobody has asked for it.
  std::vector<std::shared_ptr<const HostFingerprint>> fingerprints;

  // Constant once the call is submitted.
  uint64_t position = 0;  // among the model's calls; never reused, unlike `index`
  // The caller's thread-local state (autograd mode, dispatch modes, autocast).
  std::optional<at::ThreadLocalState> thread_state;
  AutocastState autocast;
  std::vector<LayerHabitsPtr> habits;                   // [layer]
  std::vector<std::vector<char>> trainable;             // [layer][parameter]
  std::vector<std::shared_ptr<const void>> attributes;  // [layer], see Layer::attributes
  std::vector<memory::WeightVersionPtr> readings;       // [block]
  // Whether a parameter of the block requires gradients.
  bool trains(size_t block) const;
  std::vector<char> saved_boundaries;        // [layer]: values before this layer are kept
  std::vector<device::EventPtr> loss_ready;  // [microbatch]
  LossScale::Reserved loss_scales;           // of its losses
  // Of a loss that is open (Loss::is_open): the microbatches in the order in which theirs are computed, and
  // [microbatch] the event that lets it be computed, null for the first one. Else empty.
  std::vector<int> loss_order;
  std::vector<device::EventPtr> loss_turns;
  bool keep_outputs = false;
  bool keeps_caller = false;  // control returns to the caller only when nothing of the call runs any more
  bool input_gradients = false;
  bool verified = false;  // one of its jobs runs on another device, too

  // Set with each backward that is submitted, while nothing of the call runs.
  bool keep_values = false;  // there may be another backward (retain_graph)
  // [block]; null if the block gets no gradients.
  std::vector<memory::GradientBlockPtr> bases;
  std::vector<memory::GradientBlockPtr> results;
  // One of the two; neither if one job makes the whole sum.
  std::vector<std::unique_ptr<BlockSum>> block_sums;
  std::vector<std::unique_ptr<memory::TiedSum>> tied_sums;

  // The jobs' until the caller has the losses, then the caller's, which drops the loss and the labels.
  std::shared_ptr<Loss> loss;
  std::shared_ptr<const std::vector<Values>> labels;  // [microbatch], host
  std::vector<std::vector<at::Tensor>> losses;        // [microbatch], host; readable once its `loss_ready` has fired

  // The values of buffers before a forward that writes them: [layer][microbatch] -> one value per buffer.
  struct BufferSnapshot {
    std::vector<memory::HostValuePtr> tensors;
    device::EventPtr produced;
  };
  void save_snapshot(int layer, int microbatch, BufferSnapshot snapshot);
  std::optional<BufferSnapshot> snapshot(int layer, int microbatch) const;

  // The loss of `microbatch` is computed, and is open still or not.
  void let_losses_go_on(bool is_open, int microbatch);
  // The loss of `microbatch` requires no gradient. Returns whether that has been said of all microbatches.
  bool lacks_gradient(int microbatch);

  // The seed of the generators for layer `layer` and a microbatch; the loss counts as the layer after the last.
  uint64_t seed(int layer, int microbatch) const {
    return layer_seed(base_seed, model->name, index, microbatch, layer);
  }

  // `step`: explains an error of a device that runs out of memory. It may refer back to an object that holds this call.
  // So with `until_over` it is dropped when the last job is over, unless a device has run out of memory.
  void keep_step(std::shared_ptr<const StepNote> step, bool until_over);
  // Records that a device has run out of memory; call it before fail(). Only the first record counts.
  void ran_out(FullDevice full);
  // Returns the argument of ran_out() and the step, and clears them; empty if there is none.
  struct Lack {
    FullDevice full;
    std::shared_ptr<const StepNote> step;
  };
  std::optional<Lack> take_lack();

 private:
  size_t at(int layer, int microbatch) const {
    return static_cast<size_t>(layer) * static_cast<size_t>(microbatches) + static_cast<size_t>(microbatch);
  }

  std::vector<BoundaryValues> values_;
  std::vector<BoundaryGradients> gradients_;
  std::atomic<bool> failed_{false};

  mutable Mutex mutex_;
  device::EventList events_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::exception_ptr error_ ROUNDPIPE_GUARDED_BY(mutex_);
  int jobs_left_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  device::EventPtr finished_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::map<std::pair<int, int>, BufferSnapshot> snapshots_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::set<int> without_gradient_ ROUNDPIPE_GUARDED_BY(mutex_);  // microbatches; a job may run twice
  std::shared_ptr<const StepNote> step_ ROUNDPIPE_GUARDED_BY(mutex_);
  bool step_until_over_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
  std::optional<FullDevice> full_ ROUNDPIPE_GUARDED_BY(mutex_);
};
using CallPtr = std::shared_ptr<Call>;

// Whether losses that were computed twice are the same: some devices' kernels round anew each time.
bool are_same_losses(const std::vector<at::Tensor>& again, const std::vector<at::Tensor>& first);

}  // namespace roundpipe::runtime
