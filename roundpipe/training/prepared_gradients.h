#pragma once

#include <limits>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe {

// What is done with the gradients in parameters' `.grad` before an optimizer uses them.
struct PreparedGradients {
  bool overflowed = false;                                 // one was inf or NaN under a scale; no step is to be made
  double norm = std::numeric_limits<double>::quiet_NaN();  // before clipping, unless it was not asked for
};

// Divides them by the scale of their losses (undefined: these were not scaled), then clips them to `max_norm`.
PreparedGradients prepare_gradients(const std::vector<at::Tensor>& parameters, const at::Tensor& loss_scale,
                                    const std::optional<double>& max_norm);

}  // namespace roundpipe
