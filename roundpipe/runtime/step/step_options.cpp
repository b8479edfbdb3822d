#include <roundpipe/runtime/step/step_options.h>

#include <cmath>
#include <stdexcept>
#include <string>

#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>

namespace roundpipe {

namespace {

std::string option_of(ClipBy clip_by) { return frontend().option("clip_by", name_of(clip_by)); }

}  // namespace

const char* name_of(ClipBy clip_by) {
  if (clip_by == ClipBy::kNorm) return "norm";
  return clip_by == ClipBy::kLastNorm ? "last_norm" : "measured_norm";
}

void check(const StepOptions& options, bool several_nodes) {
  if (options.max_grad_norm && !(*options.max_grad_norm > 0)) {
    throw std::invalid_argument(
        concat("[step] max_grad_norm is ", *options.max_grad_norm, ", expected a positive number or none"));
  }
  if (options.clip_by != ClipBy::kNorm && !options.max_grad_norm) {
    throw std::invalid_argument(concat("[step] ", option_of(options.clip_by),
                                       " is given without max_grad_norm, expected the norm to clip to beside it"));
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

void refuse_two_passes(const char* where) {
  throw std::invalid_argument(concat("[", where,
                                     "] two passes over a batch measure the gradients of one process, and several "
                                     "train the model, expected clipping by the last step's norm (",
                                     option_of(ClipBy::kLastNorm), "), or gradients that wait for the step"));
}

void require_own_norm(const StepOptions& options) {
  if (options.clip_by == ClipBy::kNorm) return;
  throw std::invalid_argument(concat("[step] ", option_of(options.clip_by),
                                     " is given, expected it with an optimizer that uses gradients at once; by the "
                                     "norm of this step, the clipping is exact"));
}

}  // namespace roundpipe
