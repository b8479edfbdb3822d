#include <roundpipe/api/step.h>

#include <roundpipe/core/moved_from.h>
#include <roundpipe/device/event.h>
#include <roundpipe/runtime/step/step_run.h>

namespace roundpipe {

runtime::StepRun& Step::run() const {
  require_not_moved_from(run_ != nullptr, "step");
  return *run_;
}

double Step::grad_norm() const {
  if (is_over_) return grad_norm_;
  device::wait_interruptible(*run().measured());
  return run_->norm();
}

bool Step::skipped() const {
  if (is_over_) return skipped_;
  device::wait_interruptible(*run().decided());
  return run_->overflowed();
}

void Step::wait() const {
  if (!is_over_) device::wait_interruptible(*run().finished());
}

}  // namespace roundpipe
