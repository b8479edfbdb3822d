#include <roundpipe/api/step.h>

#include <cmath>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/device/event.h>

namespace roundpipe {

void check(const StepOptions& options, bool several_nodes) {
  runtime::check_max_norm(options.max_grad_norm);
  if (!options.gradient_factor) return;
  const double factor = *options.gradient_factor;
  if (!std::isfinite(factor))
    throw std::invalid_argument(concat("[step] gradient_factor is ", factor, ", expected a finite number or none"));
  if (several_nodes || factor == 1) return;
  throw std::invalid_argument(concat("[step] gradient_factor is ", factor,
                                     ", and one process trains the model, expected none, or nodes in the format of the "
                                     "optimizer; to scale gradients, scale the loss"));
}

runtime::StepRun& Step::run() const {
  require_not_moved_from(run_ != nullptr, "step");
  return *run_;
}

double Step::grad_norm() const {
  if (is_over_) return grad_norm_;
  device::wait_interruptible(*run().decided());
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
