#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/runtime/step/function_thread.h>
#include <roundpipe/training/trained_parameters.h>

namespace roundpipe {

// Steps of one or more models by functions of the program, which update copies of the parameters with any optimizer.
//
// The function of a step runs on runtime::FunctionThread once all gradients have landed, with the gradients in the
// copies' `.grad`. What it has written is published when the next step is made, never in between: call s + 1 reads the
// weights of update s - 1, staleness is exactly one, and what a call reads does not depend on timing. Before a call,
// values that other code has written into the copies are published; values that the program has written into the
// models' parameters go into the copies with the next step or synchronize().
//
// Thread safety: the caller's thread, but for what is said otherwise. No lock is held while a function runs.
class CopySteps : public std::enable_shared_from_this<CopySteps> {
 public:
  using Pipelines = std::vector<std::shared_ptr<runtime::Pipeline>>;

  // `host_parameters`: of the program, used outside of the models; their gradients are in their `.grad`.
  CopySteps(Pipelines models, std::vector<at::Tensor> host_parameters);

  // The copies that optimizers update, of the parameters in `sources`; a backward shows no gradients at once any more.
  // Copies are leaves on the host that share no memory with their sources, which are those of `named`, every parameter
  // under every name, that require grad.
  void set_copies(TrainedParameters::Named named, std::vector<at::Tensor> sources, std::vector<at::Tensor> copies);
  bool has_copies() const { return trained_.has_value(); }
  // See TrainedParameters::late.
  std::optional<std::string> late_parameter() const { return trained_ ? trained_->late() : std::nullopt; }

  // Publishes what other code has written into the copies, for a call that is about to read the weights.
  void publish_written_copies();
  // Copies what the program has written into the models' parameters, or assigned to them. REQUIRES: no step function of
  // these models is running.
  void take_writes();

  // A step by a function, in three parts. First, waits for the step function under way and throws what it threw, and
  // what running calls threw. `asynchronous`: whether the next call reads the weights from before this step.
  void prepare_step(bool asynchronous);
  // Queues the function. If a call whose gradients it was to use has failed, it does not run, and nothing changes.
  // REQUIRES: prepare_step(); no call since.
  void queue_step(std::function<void()> function);
  // Waits for the step and lets the next call read its weights. Throws what the function threw.
  void settle_step();

  // Waits for the step function under way, and throws what it threw. Throws Error on a thread of the engine and in a
  // step function, which would wait for itself. Then waits for `reader` (keep_for).
  void finish_update();
  // The same, and for step functions of other models, which may step an optimizer over these copies, too.
  void finish_all_updates();
  // Lets nothing change the copies before the next finish_update() has called `wait_read`, which may wait.
  void keep_for(std::function<void()> wait_read) { reader_ = std::move(wait_read); }

  // Waits for all work; then calls read the newest weights, which the parameters show with the gradients that no step
  // has consumed.
  void synchronize();
  // Lets the models' parameters show what the next call reads.
  void show_weights();

  // Waits for gradients that no step has consumed, and adds them to those of the copies.
  void hand_over();
  // Publishes what an optimizer has written into the copies outside of a step function; torch's fused kernels do not
  // count their writes. The next call reads it.
  void publish_copies();
  // Publishes changes that were made to the copies after the step function that used them.
  void changed_from_outside();
  // Clears the copies' gradients, without waiting; also in a step function.
  void clear_gradients(bool set_to_none);
  // Whether a copy has a gradient, without waiting for those that no step has consumed.
  bool has_landed_gradients() const;

  // -- for checkpoints --
  // The copy of a model's parameter; undefined if there is none.
  at::Tensor copy_of(const at::Tensor& parameter) const;
  // Whether the copies hold a step that calls do not read yet. REQUIRES: no step function is running.
  bool unpublished() const { return unpublished_; }
  // Takes parameters and copies as they have been loaded. `unpublished`: calls read the parameters until the next step.
  void accept_loaded(bool unpublished);

 private:
  // The state of a source: what differs from it later was written or assigned.
  using Seen = std::pair<uint32_t, const void*>;
  using Updates = std::vector<std::unique_ptr<runtime::WeightUpdate>>;
  using Tickets = std::vector<std::unique_ptr<runtime::StepTicket>>;

  bool run_step(Updates& weights, Tickets& tickets, const std::vector<at::Tensor>& host_gradients,
                const std::function<void()>& function);
  void take_result(const runtime::FunctionThread::Run& finished);
  std::vector<at::Tensor> take_host_gradients();
  void add_host_gradients(const std::vector<at::Tensor>& gradients);
  Updates begin_updates(bool in_place);
  Tickets begin_tickets();
  void publish_now();
  bool copies_written() const;
  std::vector<uint32_t> copy_versions() const;
  std::vector<Seen> look() const;
  bool has_gradients() const;
  void adopt_replaced();
  void drain();

  const Pipelines models_;
  const std::vector<at::Tensor> host_parameters_;
  std::vector<size_t> host_copies_;           // of each host parameter, the index of its copy; kNone: it has none
  std::optional<TrainedParameters> trained_;  // none: there are no copies
  std::vector<at::Tensor> sources_, copies_;
  std::vector<char> is_on_host_;  // of each source
  std::vector<Seen> seen_;        // of the sources
  std::vector<uint32_t> seen_copies_;
  bool unpublished_ = false;
  bool has_updated_ = false;  // the function thread's, while a step runs
  runtime::FunctionThread::RunPtr pending_;
  std::function<void()> reader_;
};

}  // namespace roundpipe
