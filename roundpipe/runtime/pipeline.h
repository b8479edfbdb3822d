#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/runtime/engine.h>
#include <roundpipe/runtime/model/gradient_ledger.h>
#include <roundpipe/runtime/model/weight_publisher.h>
#include <roundpipe/runtime/pipeline_node.h>
#include <roundpipe/runtime/step/step_ticket.h>
#include <roundpipe/runtime/submission.h>

namespace roundpipe::runtime {

// Runs one model's calls: batches in, outputs, losses and gradients out. Beside it stand the ledger of its gradients,
// the publisher of its weights, and its planner.
//
// Thread safety: all methods from one thread at a time, the caller's. A pipeline may be dropped while calls run: they
// end by themselves.
// Errors: a job's error is thrown by the call that waits for it or by the next method that checks (every one that
// says so); the pipeline has then drained this model's work, gone back to the last gradients that are good, and can
// be used again. The same methods warn of what the engine has noted of calls so far (see Frontend::warn): a call's
// notice comes with the first of them that waits for it, before an error that it ends with.
class Pipeline : public std::enable_shared_from_this<Pipeline>, public BackwardRunner {
 public:
  Pipeline(std::string name, std::vector<std::unique_ptr<Layer>> layers, bool pinned);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

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
  // Fails the last call as if a job had, with `message`: its gradients are dropped, and Error is thrown.
  void discard_last_call(const std::string& message);
  // Waits until no call is running; checks for errors.
  void drain();

  // Takes the gradients summed since the last step, one entry for each block, null where there are none. Checks for
  // errors.
  std::vector<memory::GradientBlockPtr> take_gradients();
  // The same, on their way to the optimizer's parameters (see WeightPublisher).
  std::unique_ptr<StepTicket> begin_step();
  // The gradients that calls in flight will leave have been promised to a step, which may use some of them before all
  // are there: an interrupted wait must not make these calls fail.
  void commit_calls();
  // From now on 16-bit weights have fp32 gradients on the host. Waits until no call is running; gradients that no step
  // has taken are dropped.
  void keep_gradients_in_fp32();
  // Points the user's parameters at the current version and their .grad at what has been summed. After drain().
  void expose();

  GradientLedger& gradients() { return gradients_; }
  WeightPublisher& weights() { return weights_; }
  ModelPlanner& planner() { return planner_; }
  const ModelPlanner& planner() const { return planner_; }
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

  std::vector<std::vector<at::Tensor>> backward(const CallPtr& call, const schedule::Plan& plan,
                                                std::vector<std::vector<at::Tensor>> gradients,
                                                bool keep_graph) override;
  void finish_backward(const CallPtr& call) override;

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
  void wait_or_abort(const device::EventPtr& event, const CallPtr& call);
  void recover();
  // Recovers and throws `error`, which a wait or an active call has ended with, explained where memory ran out.
  [[noreturn]] void recover_from(std::exception_ptr error);
  // Warns of what the engine has noted, if anything.
  void tell();
  Values read_outputs(Call& call, int microbatch) const;

  std::shared_ptr<ModelState> model_;
  std::vector<CallPtr> active_;  // submitted, not known to be good; oldest first
  CallPtr last_call_;
  std::optional<schedule::Plan> last_plan_;
  GradientLedger gradients_;
  WeightPublisher weights_;
  ModelPlanner planner_;
  uint64_t calls_ = 0;
  uint64_t positions_ = 0;
  uint64_t random_seed_;
  std::shared_ptr<Engine> engine_;  // of the last call
};

}  // namespace roundpipe::runtime
