#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::runtime {

// Tensors that the caller passes in, as devices will see them. The caller may change them as soon as its call has
// returned, so they are copied. `pinned`: into page-locked memory. Any thread.

// Labels, microbatch by microbatch. A tensor that several microbatches share is copied once.
std::vector<Values> taken_over(std::vector<Values> labels, bool pinned);

// A gradient from autograd, on any device. Not copied if nothing else holds it.
at::Tensor taken_over_gradient(const at::Tensor& gradient, bool pinned);

}  // namespace roundpipe::runtime
