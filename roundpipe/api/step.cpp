#include <roundpipe/api/step.h>

#include <roundpipe/device/event.h>

namespace roundpipe {

double Step::grad_norm() const {
  if (!run_) return grad_norm_;
  device::wait_interruptible(*run_->decided());
  return run_->norm();
}

bool Step::skipped() const {
  if (!run_) return skipped_;
  device::wait_interruptible(*run_->decided());
  return run_->overflowed();
}

void Step::wait() const {
  if (run_) device::wait_interruptible(*run_->finished());
}

}  // namespace roundpipe
