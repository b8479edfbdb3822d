#pragma once

#include <memory>
#include <optional>

#include <roundpipe/api/grad_scaler.h>
#include <roundpipe/runtime/step/step_run.h>

namespace roundpipe {

// Options of one step of an optimizer.
struct StepOptions {
  // Whether the next call still reads the weights from before this step, and the one after it reads this step's: then
  // the update runs while the next batch computes, and staleness is exactly one. Otherwise the next call reads the new
  // weights.
  bool asynchronous = runtime::StepOptions{}.asynchronous;
  // Gradients whose norm over the whole model is larger are scaled down to it, a positive number; every update then
  // waits for all gradients. Infinity only measures the norm. Unset: they are used as they are.
  std::optional<double> max_grad_norm = std::nullopt;
  // What scaled the losses: gradients are unscaled, a step with inf or NaN changes nothing, and the scale is updated.
  GradScaler* scaler = nullptr;
  // With several nodes, the factor of gradients that were added over all of them. Unset: 1 / nodes, the mean, as in
  // torch's DistributedDataParallel; 1 suits losses that are divided by a count over all nodes already.
  std::optional<double> gradient_factor = std::nullopt;
};

// Throws std::invalid_argument for a norm that is not positive, and for a factor that is no number or, unless there are
// `several_nodes`, not 1.
void check(const StepOptions& options, bool several_nodes);

// One step. Of one that was moved from while it might still run, every function but assignment throws
// std::invalid_argument. Thread safety: any thread.
class Step {
 public:
  // A step that may still run.
  explicit Step(std::shared_ptr<runtime::StepRun> run) : run_(std::move(run)) {}
  // A step that is over.
  Step(double grad_norm, bool skipped) : is_over_(true), grad_norm_(grad_norm), skipped_(skipped) {}

  // The norm of all gradients, unscaled, before clipping. Waits until the last gradient has landed. NaN unless the step
  // had max_grad_norm or a scaler, and if the backward failed.
  double grad_norm() const;
  // Whether the step changed nothing because a gradient under a scaler was inf or NaN. Waits like grad_norm().
  bool skipped() const;
  // Waits until the update has finished. Throws its error.
  void wait() const;

 private:
  runtime::StepRun& run() const;

  bool is_over_ = false;
  std::shared_ptr<runtime::StepRun> run_;  // null: over, or moved from
  // Of a step that is over.
  double grad_norm_ = 0;
  bool skipped_ = false;
};

}  // namespace roundpipe
