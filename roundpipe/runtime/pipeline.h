#pragma once

#include <deque>
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

// Runs one model's calls: batches in; outputs, losses and gradients out. The ledger of its gradients, the publisher of
// its weights and its planner are separate classes that it owns.
//
// Thread safety: all methods from one thread at a time, the caller's. A pipeline may be dropped while calls run: they
// finish by themselves.
// Errors: a job's error is thrown by the method that waits for the job, or by the next method that checks for errors
// (documented at each). By then the pipeline has drained this model's work and restored the last good gradients, and
// can be used again. The same methods show the engine's warnings about calls (see Frontend::warn): a call's warning is
// shown by the first of them that waits for it, before the call's error is thrown.
class Pipeline : public std::enable_shared_from_this<Pipeline>, public BackwardRunner {
 public:
  // `in_place_of`: a pipeline whose parameters this one may take over; null: none. See ModelState.
  Pipeline(std::string name, std::vector<std::unique_ptr<Layer>> layers, bool pinned,
           const Pipeline* in_place_of = nullptr);
  ~Pipeline();
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  struct Outputs {
    std::vector<Values> microbatches;
  };

  // Runs the batch, in microbatches of the options' number already, forward. With options.requires_grad, outputs that
  // depend on something trainable carry a graph whose backward runs in the pipeline. Checks for errors; blocks until
  // the outputs are on the host, or until the call is finished if it keeps its caller (Call::keeps_caller).
  Outputs forward(const std::vector<Values>& inputs, RunOptions options, CallTerms terms = {});

  struct TrainResult {
    std::vector<std::vector<at::Tensor>> losses;  // [microbatch][as the loss returned them]
    std::vector<Values> outputs;                  // [microbatch] if asked for
  };
  // A batch that has been submitted for forward, loss and backward.
  struct Submitted {
    CallPtr call;                       // until finish(); its error may refer back to an owner of this object
    std::shared_ptr<ExecutionLog> log;  // grows until the backward is over
    std::vector<Values> inputs;         // kept only if gradients continue into them
    bool finished = false;
  };
  // Starts forward, loss and backward. Checks for errors. Does not wait for the call, unless it keeps its caller; may
  // wait for earlier calls, as GradientLedger::import does or if the pool of devices was replaced.
  std::shared_ptr<Submitted> submit(const std::vector<Values>& inputs, const std::vector<Values>& labels,
                                    std::shared_ptr<Loss> loss, bool keep_outputs, RunOptions options,
                                    CallTerms terms = {});
  // Returns the losses of a submitted batch. Blocks until they are on the host; the backward may still run. If inputs
  // require gradients, blocks until the call is finished, then continues the backward into them. Throws the call's
  // error. Once.
  TrainResult finish(Submitted& submitted);
  // submit(), then finish().
  TrainResult forward_backward(const std::vector<Values>& inputs, const std::vector<Values>& labels,
                               std::shared_ptr<Loss> loss, bool keep_outputs, RunOptions options,
                               CallTerms terms = {}) {
    return finish(*submit(inputs, labels, std::move(loss), keep_outputs, std::move(options), std::move(terms)));
  }

  // Throws the first error of earlier calls, if any.
  void raise_pending();
  // See ModelPlanner; checks for errors.
  std::optional<double> busy_share();
  // Waits until the losses of all calls are known; throws what such a call threw.
  void wait_losses();
  // Waits until no call is running; checks for errors.
  void drain();

  // Waits until the buffers on the host hold the results of the forwards submitted so far. Throws their error.
  void wait_buffers() const;

  // Takes the gradients summed since the last step: one entry for each block, null where there is none. Checks for
  // errors.
  std::vector<memory::GradientBlockPtr> take_gradients();
  // The same, as a ticket for the optimizer's parameters (see WeightPublisher).
  std::unique_ptr<StepTicket> begin_step();
  // Marks calls in flight as committed: their gradients belong to a step, which may use some before all have landed. An
  // interrupted wait must not fail such a call.
  void commit_calls();
  // The call that has made the gradients which no step has taken, if they have limited room; null: there is none.
  CallPtr call_of_gradients() const;
  // As if this call and those since had not been made: the next one draws this call's random numbers, and buffers are
  // as they were before it. REQUIRES: drain() since.
  void undo(const Call& call);
  // The user has let the model go: another one may be made of its parameters. Then calls, backwards and steps of this
  // one throw std::invalid_argument.
  void release() { model_->claim->release(); }

  // From now on, 16-bit weights have fp32 gradients on the host. Waits until no call is running; drops gradients that
  // no step has taken.
  void keep_gradients_in_fp32();
  // See ModelState::bound_gradients. Waits until no call is running; gradients that no step has taken stay.
  void bound_gradients(bool is_bounded);
  // Points the user's parameters at the current version, and puts the summed gradients into their .grad. Call drain()
  // before.
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
  // The base of layer_seed(): the seed of the host's default generator when the model was wrapped.
  uint64_t random_seed() const { return random_seed_; }
  void set_random_seed(uint64_t seed) { random_seed_ = seed; }
  // The records of the last call so far.
  std::vector<ExecutionRecord> last_records() const;
  // The logs of the latest calls, oldest first, kKeptLogs at most.
  std::vector<std::shared_ptr<ExecutionLog>> recent_logs() const { return {recent_logs_.begin(), recent_logs_.end()}; }
  static constexpr size_t kKeptLogs = 8;
  // The log of the last call, which grows until the call is over; null before the first call.
  std::shared_ptr<ExecutionLog> last_log() const { return last_call_ ? last_call_->log : nullptr; }
  const std::optional<schedule::Plan>& last_plan() const { return last_plan_; }
  // The plan of the last call with a backward.
  const std::optional<schedule::Plan>& last_step_plan() const { return last_step_plan_; }
  // Of gradients, in that step.
  int last_step_groups() const { return last_step_groups_; }

  std::vector<std::vector<at::Tensor>> backward(const CallPtr& call, const schedule::Plan& plan,
                                                std::vector<std::vector<at::Tensor>> gradients,
                                                bool keep_graph) override;
  void finish_backward(const CallPtr& call) override;

 private:
  CallPtr begin_call(RunOptions options, CallTerms terms, Engine& engine);
  void take_engine();
  // Throws std::invalid_argument if another model has the parameters by now.
  void require_parameters(const char* where) const;
  // Makes `call` active and runs `submission`, which plans and submits it. If that throws, nothing has been submitted.
  template <typename Submission>
  void submit_or_undo(const CallPtr& call, Submission submission);
  // How often each of the user's parameters has been written to.
  std::vector<uint32_t> parameter_writes() const;
  void note_plan(Call& call, const schedule::Plan& plan);
  void wait_or_abort(const device::EventPtr& event, const CallPtr& call);
  // Fails the call, as if a job had failed, and throws, if a loss is NaN that must not be (CallOptions::refuses_nan).
  void check_losses(const CallPtr& call);
  void recover();
  // Recovers and throws `error`, from a wait or an active call, with an explanation if memory ran out.
  [[noreturn]] void recover_from(std::exception_ptr error);
  // `error` with all that the user has to know, if it is that a device has failed.
  std::exception_ptr told(const std::exception_ptr& error, const std::vector<CallPtr>& calls);
  // Shows the engine's warning, if there is one.
  void tell();
  Values read_outputs(Call& call, int microbatch) const;

  std::shared_ptr<ModelState> model_;
  std::vector<CallPtr> active_;  // submitted and not yet known to have succeeded; oldest first
  CallPtr last_call_;
  CallPtr gradient_call_;  // the last that has made gradients, if they have limited room
  std::deque<std::shared_ptr<ExecutionLog>> recent_logs_;
  std::optional<schedule::Plan> last_plan_;
  std::optional<schedule::Plan> last_step_plan_;
  int last_step_groups_ = 1;
  GradientLedger gradients_;
  WeightPublisher weights_;
  ModelPlanner planner_;
  uint64_t calls_ = 0;
  uint64_t positions_ = 0;
  uint64_t training_calls_ = 0;  // those that require gradients, while jobs are verified
  uint64_t random_seed_;
  std::shared_ptr<Engine> engine_;  // of the last call
  uint64_t engine_changes_ = 0;     // Engine::changes() then
};

}  // namespace roundpipe::runtime
