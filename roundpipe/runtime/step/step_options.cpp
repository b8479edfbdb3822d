#include <roundpipe/runtime/step/step_options.h>

#include <cmath>
#include <stdexcept>

#include <roundpipe/core/error.h>

namespace roundpipe {

void check(const StepOptions& options, bool several_nodes) {
  if (options.max_grad_norm && !(*options.max_grad_norm > 0)) {
    throw std::invalid_argument(
        concat("[step] max_grad_norm is ", *options.max_grad_norm, ", expected a positive number or none"));
  }
  if (!options.gradient_factor) return;
  const double factor = *options.gradient_factor;
  if (!std::isfinite(factor))
    throw std::invalid_argument(concat("[step] gradient_factor is ", factor, ", expected a finite number or none"));
  if (several_nodes || factor == 1) return;
  throw std::invalid_argument(concat("[step] gradient_factor is ", factor,
                                     ", and one process trains the model, expected none, or nodes in the format of the "
                                     "optimizer; to scale gradients, scale the loss"));
}

}  // namespace roundpipe
