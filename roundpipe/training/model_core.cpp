#include <roundpipe/training/model_core.h>

#include <stdexcept>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/loss_check.h>

namespace roundpipe {

using runtime::Values;
using schedule::PlanMode;

ModelCore::ModelCore(std::shared_ptr<runtime::Pipeline> pipeline, MemoryBudget budget, bool checks_loss)
    : pipeline_(std::move(pipeline)),
      memory_(std::make_shared<StepMemory>(*pipeline_, budget)),
      checks_loss_(checks_loss && checks_losses()) {}

StepShape ModelCore::shape(const CallArguments& arguments, PlanMode mode, const RunOptions& options) const {
  return shape_of(arguments.inputs, arguments.general_structures, arguments.labels, arguments.loss, mode, options,
                  arguments.savers);
}

runtime::CallTerms ModelCore::terms(const CallArguments& arguments, const StepShape& step) const {
  runtime::CallTerms terms;
  terms.keeps_caller = arguments.changeable;
  terms.step = make_step_note(memory_, step);
  return terms;
}

void ModelCore::require_gradients(const char* where, const RunOptions& options) {
  if (!c10::InferenceMode::is_enabled() && at::GradMode::is_enabled() && options.requires_grad.value_or(true)) return;
  throw std::invalid_argument(concat("[", where, "] gradients are off here, expected them on, as ", where,
                                     " makes them; leave the NoGradGuard or InferenceMode, or call forward"));
}

bool ModelCore::makes_graph(const RunOptions& options) {
  return !c10::InferenceMode::is_enabled() && options.requires_grad.value_or(at::GradMode::is_enabled());
}

std::vector<Values> ModelCore::forward(const CallArguments& arguments, RunOptions options) {
  const bool requires_grad = makes_graph(options);
  options.requires_grad = requires_grad;
  // The engine's tensors are none of inference mode, even if its callers are in it.
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode grad_mode(requires_grad);
  const StepShape step = shape(arguments, requires_grad ? PlanMode::kTrain : PlanMode::kInference, options);
  options.recompute_grain = memory_->admit(step);
  return pipeline_->forward(arguments.inputs, std::move(options), terms(arguments, step)).microbatches;
}

std::shared_ptr<PendingCall> ModelCore::submit(const CallArguments& arguments, RunOptions options, bool keep_outputs,
                                               bool refuses_nan_early) {
  const StepShape step = shape(arguments, PlanMode::kFused, options);
  options.recompute_grain = memory_->admit(step);
  runtime::CallTerms terms = this->terms(arguments, step);
  terms.refuses_nan = checks_loss_;
  terms.refuses_nan_early = checks_loss_ && refuses_nan_early;
  return std::make_shared<PendingCall>(
      pipeline_, pipeline_->submit(arguments.inputs, arguments.labels, arguments.call_loss, keep_outputs,
                                   std::move(options), std::move(terms)));
}

MemoryPrediction ModelCore::predict_memory(const CallArguments& arguments, const RunOptions& options) {
  return memory_->predict(shape(arguments, PlanMode::kFused, options));
}

std::vector<simulate::LayerFootprint> ModelCore::footprints(const CallArguments& arguments, const RunOptions& options) {
  return memory_->footprints(shape(arguments, PlanMode::kFused, options));
}

bool ModelCore::fits(const CallArguments& arguments, const RunOptions& options) {
  return memory_->fits(shape(arguments, PlanMode::kFused, options));
}

CallResult PendingCall::finish() {
  // A backward may continue into the inputs, whatever the caller's mode is by now.
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode grad_mode(true);
  const runtime::Pipeline::TrainResult result = pipeline_->finish(*submitted_);
  // As after a plain backward, if the caller steps by the parameters' `.grad`.
  if (pipeline_->gradients().shows_at_once()) {
    pipeline_->drain();
    pipeline_->expose();
  }
  const at::NoGradGuard no_grad;
  CallResult taken;
  taken.losses = result.losses.front();
  for (size_t m = 1; m < result.losses.size(); ++m) {
    for (size_t i = 0; i < taken.losses.size(); ++i) taken.losses[i] = taken.losses[i] + result.losses[m][i];
  }
  taken.outputs = result.outputs;
  return taken;
}

}  // namespace roundpipe
