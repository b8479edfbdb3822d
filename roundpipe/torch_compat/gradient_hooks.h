#pragma once

#include <ATen/core/TensorBase.h>

namespace roundpipe::torch_compat {

// Whether Tensor::register_hook has given `leaf` a function that is still there. The engine sums gradients without
// autograd's accumulation, so nothing would call it.
bool has_gradient_hooks(const at::TensorBase& leaf);

}  // namespace roundpipe::torch_compat
