#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/runtime/engine.h>
#include <roundpipe/runtime/submission.h>

namespace roundpipe::runtime {

// The gradients that one step consumes, on their way to the optimizer. Made on the caller's thread, used once on the
// optimizer's.
class StepTicket {
 public:
  StepTicket(std::shared_ptr<ModelState> model, std::vector<memory::GradientBlockPtr> gradients,
             std::vector<std::vector<at::Tensor>> optimizer_parameters);

  // Waits until every gradient has landed and puts them into the optimizer parameters' .grad, added to what is there
  // already. False, with nothing changed, when a call that they come from has failed.
  bool hand_over();

 private:
  std::shared_ptr<ModelState> model_;
  std::vector<memory::GradientBlockPtr> gradients_;
  std::vector<std::vector<at::Tensor>> optimizer_parameters_;
};

// One model in the pipeline.
//
// Thread safety: all methods from one thread at a time, the caller's, except finish_publish (the optimizer's).
// Errors: a job's error is thrown by the call that waits for it or by the next method that checks (every one that
// says so); the pipeline has then drained this model's work, gone back to the last gradients that are good, and can
// be used again. The same methods warn of what the engine has noted of calls so far (see ErrorHooks::warn): a call's
// notice comes with the first of them that waits for it, before an error that it ends with.
class Pipeline : public std::enable_shared_from_this<Pipeline> {
 public:
  Pipeline(std::string name, std::vector<std::unique_ptr<Layer>> layers, bool pinned);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // Deletes a pipeline that may still have calls running, from any thread, without waiting: the interpreter's garbage
  // collector also runs on the very threads that these calls need. One that is busy is kept until the next pipeline
  // is made or a call finds it idle.
  static void dispose(Pipeline* pipeline);

  struct Outputs {
    std::vector<Values> microbatches;
  };

  // Runs the batch forward. With options.requires_grad, outputs that depend on something trainable carry a graph
  // whose backward runs through the pipeline. Checks for errors; blocks until the outputs are here.
  // `step`: see Call::keep_step; may be null, here and in submit().
  Outputs forward(const std::vector<Values>& inputs, CallOptions options, const Route& route,
                  std::shared_ptr<const void> step = nullptr);

  struct TrainResult {
    std::vector<std::vector<at::Tensor>> losses;  // [microbatch][as the loss returned them]
    std::vector<Values> outputs;                  // [microbatch] if asked for
  };
  // A batch that has been submitted for forward, loss and backward.
  struct Submitted {
    CallPtr call;                       // until finish(): its error may lead back to who holds this
    std::shared_ptr<ExecutionLog> log;  // grows until the backward is over
    std::vector<Values> inputs;         // kept only where gradients go on into them
    bool finished = false;
  };
  // Starts forward, loss and backward. Checks for errors; does not block.
  std::shared_ptr<Submitted> submit(const std::vector<Values>& inputs, const std::vector<Values>& labels,
                                    std::shared_ptr<Loss> loss, bool keep_outputs, CallOptions options,
                                    const Route& route, std::shared_ptr<const void> step = nullptr);
  // The losses of a submitted batch; blocks until they are here: the backward may still run. Throws its error. Once.
  TrainResult finish(Submitted& submitted);
  // Both.
  TrainResult forward_backward(const std::vector<Values>& inputs, const std::vector<Values>& labels,
                               std::shared_ptr<Loss> loss, bool keep_outputs, CallOptions options, const Route& route) {
    return finish(*submit(inputs, labels, std::move(loss), keep_outputs, options, route));
  }

  // Throws the first error of earlier calls, if any.
  void raise_pending();
  // Gives up the last call as if a job had failed with `message`: its gradients are dropped, and Error is thrown.
  void discard_last_call(const std::string& message);
  // Waits until no call is running; checks for errors.
  void drain();

  // Host tensors that the optimizer updates, per block and parameter; a frozen parameter's entry is the user's own.
  void set_optimizer_parameters(std::vector<std::vector<at::Tensor>> parameters);

  // Takes the gradients summed since the last step, one entry for each block, null where there are none. Checks for
  // errors.
  std::vector<memory::GradientBlockPtr> take_gradients();
  // The same, on their way to the optimizer's parameters.
  std::unique_ptr<StepTicket> begin_step();
  // From now on 16-bit weights have fp32 gradients on the host. Waits until no call is running; gradients that no step
  // has taken are dropped.
  void keep_gradients_in_fp32();
  // The gradients that calls under way will leave have been promised to a step that may use some of them before all are
  // there: an interrupted wait must not make these calls fail.
  void commit_calls();
  // Forgets the gradients summed since the last step, without waiting for those that are on their way.
  void drop_gradients();
  // Calls from now on read the optimizer's values of now. `in_place`: nothing is running. Each begin is followed by
  // one finish_publish on the optimizer's thread.
  void begin_publish(bool in_place);
  void finish_publish();
  // Points the user's parameters at the current version and their .grad at what has been summed. After drain().
  void expose();
  // Whether calls have left gradients, or will, that no step has taken.
  bool has_gradients() const;
  // Whether .grad is to show gradients as soon as a backward is over, as it does in a plain PyTorch loop.
  bool exposes_gradients() const { return exposes_gradients_; }
  void set_exposes_gradients(bool exposes) { exposes_gradients_ = exposes; }
  // Waits until the version that calls read is complete and points the user's parameters at it.
  void show_weights();

  // The stages that simple balancing by measured (or estimated) costs gives now, see schedule::choose_stages.
  schedule::Stages choose_stages(schedule::PlanMode mode, int min_stages, double upper_threshold,
                                 int64_t memory_limit_bytes) const;
  // Those that a plan of the planner's own would have now.
  schedule::Stages planned_stages(schedule::PlanMode mode, int microbatches);
  // What a microbatch holds on a device, see ModelPlanner::set_bytes; `work_bytes`: all beside weights, at most.
  void set_bytes(std::vector<int64_t> saved_bytes, std::vector<int64_t> activation_bytes, int64_t most_stage_bytes,
                 int64_t work_bytes) {
    planner_.set_bytes(std::move(saved_bytes), std::move(activation_bytes), most_stage_bytes);
    model_->work_bytes.store(work_bytes);
  }
  // The plans that the next calls would have.
  std::vector<schedule::Plan> preview_plans(const Route& route, schedule::PlanMode mode, int microbatches,
                                            int steps) const {
    return runtime::preview_plans(*model_, route, mode, microbatches, asynchronous_, planner_, *Engine::current(),
                                  steps);
  }
  // What layers are thought to take, measured after the first calls.
  schedule::LayerCosts costs() const { return planner_.costs(); }
  // How steps are made: what the planner plans for.
  bool asynchronous() const { return asynchronous_; }
  void set_asynchronous(bool asynchronous) { asynchronous_ = asynchronous; }

  const ModelState& model() const { return *model_; }
  ModelState& model() { return *model_; }
  std::shared_ptr<ModelState> shared_model() { return model_; }
  uint64_t calls() const { return calls_; }
  void set_calls(uint64_t calls) { calls_ = calls; }
  // Base of layer_seed(): what the host's default generator was seeded with when the model was wrapped.
  uint64_t random_seed() const { return random_seed_; }
  void set_random_seed(uint64_t seed) { random_seed_ = seed; }
  // What the last call executed, as far as it has come.
  std::vector<ExecutionRecord> last_records() const;
  // The same, which goes on growing until the call is over; null before the first call.
  std::shared_ptr<ExecutionLog> last_log() const { return last_call_ ? last_call_->log : nullptr; }
  const std::optional<schedule::Plan>& last_plan() const { return last_plan_; }

  // For the autograd node of forward(): submits the backward for gradients of the outputs, per microbatch.
  std::vector<std::vector<at::Tensor>> backward(const CallPtr& call, const schedule::Plan& plan,
                                                std::vector<std::vector<at::Tensor>> gradients, bool keep_graph);
  // Waits until the backward of `call` is over, and throws what it has raised.
  void finish_backward(const CallPtr& call);

 private:
  CallPtr begin_call(CallOptions options, Engine& engine);
  void take_engine();
  // Makes `call` active and runs `submission`, which plans and submits it. When that throws, nothing has been
  // submitted.
  template <typename Submission>
  void submit_or_undo(const CallPtr& call, Submission submission);
  // How often each of the user's parameters has been written.
  std::vector<uint32_t> parameter_writes() const;
  void note_plan(Call& call, const schedule::Plan& plan);
  void import_gradients();
  // Whether the .grads of a block's parameters, whose first is number `first` of all, are untouched since expose().
  bool are_as_shown(size_t first, const std::vector<memory::NamedTensor>& parameters) const;
  void show_complete_weights();
  void wait_or_abort(const device::EventPtr& event, const CallPtr& call);
  void recover();
  // Recovers and throws `error`, which a wait or an active call has ended with, explained where memory ran out.
  [[noreturn]] void recover_from(std::exception_ptr error);
  // Warns of what the engine has noted, if anything.
  void tell();
  bool busy() const;
  static void sweep(bool wait);
  Values read_outputs(Call& call, int microbatch) const;

  std::shared_ptr<ModelState> model_;
  std::vector<std::vector<at::Tensor>> optimizer_parameters_;
  std::vector<CallPtr> active_;  // submitted, not known to be good; oldest first
  CallPtr last_call_;
  std::optional<schedule::Plan> last_plan_;
  ModelPlanner planner_;
  bool asynchronous_ = true;
  uint64_t calls_ = 0;
  uint64_t positions_ = 0;
  uint64_t random_seed_;
  bool exposed_ = false;
  std::vector<std::pair<at::Tensor, uint32_t>> shown_gradients_;  // by expose(), with their versions
  bool exposes_gradients_ = false;
  std::shared_ptr<Engine> engine_;  // of the last call
};

}  // namespace roundpipe::runtime
