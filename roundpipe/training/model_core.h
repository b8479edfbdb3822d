#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/training/step_memory.h>

namespace roundpipe {

// The arguments of one call, cut into microbatches, on the host.
struct CallArguments {
  std::vector<runtime::Values> inputs;
  std::vector<runtime::Values> labels;       // empty: the call makes no loss
  LossFunction loss;                         // of one microbatch, wherever it runs; null: none
  std::shared_ptr<runtime::Loss> call_loss;  // the same, as the devices of a call run it
  // Of each microbatch, the structure of inputs that only layers outside of a call see; empty: that of the inputs.
  std::vector<std::shared_ptr<const void>> general_structures;
  // The arguments hold something that the caller may change while the call runs.
  bool changeable = false;
  std::vector<std::string> savers;  // see StepShape
};

// What a call has given.
struct CallResult {
  std::vector<at::Tensor> losses;        // each that the loss returned, added over the microbatches; on the host
  std::vector<runtime::Values> outputs;  // of each microbatch, if they were asked for
};

// A batch that was submitted for forward, loss and backward. Thread safety: that of its model, which it may outlive.
class PendingCall {
 public:
  PendingCall(std::shared_ptr<runtime::Pipeline> pipeline, std::shared_ptr<runtime::Pipeline::Submitted> submitted)
      : pipeline_(std::move(pipeline)), submitted_(std::move(submitted)) {}

  // Waits for the losses; throws the call's error. Once. Where backwards leave their gradients in the parameters'
  // `.grad`, waits for them, too.
  CallResult finish();
  // Of the batch so far.
  std::vector<runtime::ExecutionRecord> records() const { return submitted_->log->records(); }

 private:
  std::shared_ptr<runtime::Pipeline> pipeline_;
  std::shared_ptr<runtime::Pipeline::Submitted> submitted_;
};

// The calls of one model of runtime layers: what the models of every language are faces of.
//
// Thread safety: one thread at a time, not a layer's or a loss's. Errors: see runtime::Pipeline.
class ModelCore {
 public:
  // `checks_loss`: a NaN loss is an error, unless a GradScaler belongs to the model or the environment has
  // ROUNDPIPE_CHECK_LOSS=0.
  ModelCore(std::shared_ptr<runtime::Pipeline> pipeline, MemoryBudget budget, bool checks_loss);

  const std::shared_ptr<runtime::Pipeline>& pipeline() const { return pipeline_; }
  StepMemory& memory() { return *memory_; }

  // Whether outputs of forward() carry a graph, whose backward runs on the devices: with `options.requires_grad` or, if
  // that is unset, in grad mode; never in inference mode.
  static bool makes_graph(const RunOptions& options);
  // Runs the microbatches forward and returns their outputs.
  std::vector<runtime::Values> forward(const CallArguments& arguments, RunOptions options);

  // Starts forward, loss and backward. `refuses_nan_early`: a NaN loss is found on the device, before its gradients are
  // used.
  std::shared_ptr<PendingCall> submit(const CallArguments& arguments, RunOptions options, bool keep_outputs,
                                      bool refuses_nan_early);

  // Predicts the memory that submit() with these arguments would take, without making a step.
  MemoryPrediction predict_memory(const CallArguments& arguments, const RunOptions& options);

  // What each layer takes for its largest microbatch.
  std::vector<simulate::LayerFootprint> footprints(const CallArguments& arguments, const RunOptions& options);
  // Whether the budget of devices has room for it, layer by layer if need be.
  bool fits(const CallArguments& arguments, const RunOptions& options);

  // Throws std::invalid_argument, in the name of `where`, if gradients are off here or by the options.
  static void require_gradients(const char* where, const RunOptions& options);

 private:
  StepShape shape(const CallArguments& arguments, schedule::PlanMode mode, const RunOptions& options) const;
  runtime::CallTerms terms(const CallArguments& arguments, const StepShape& step) const;

  std::shared_ptr<runtime::Pipeline> pipeline_;
  std::shared_ptr<StepMemory> memory_;  // of which notes of calls know
  bool checks_loss_;
};

}  // namespace roundpipe
