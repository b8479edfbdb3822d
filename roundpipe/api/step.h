#pragma once

#include <memory>

#include <roundpipe/runtime/step/step_options.h>

namespace roundpipe::runtime {
class StepRun;
}

namespace roundpipe {

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
