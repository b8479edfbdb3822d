#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::runtime {

// What the caller hands in, as devices will see it. The caller may change it as soon as its call has returned, so it is
// copied. `pinned`: into page-locked memory. Any thread.

// Labels, microbatch by microbatch. One that all of them share is copied once.
std::vector<Values> taken_over(std::vector<Values> labels, bool pinned);

// A gradient that autograd hands down, on any device: by reference where nobody else holds it.
at::Tensor taken_over_gradient(const at::Tensor& gradient, bool pinned);

}  // namespace roundpipe::runtime
