#pragma once

#include <utility>

#include <ATen/core/Tensor.h>

namespace roundpipe::models {

// The cosines and sines of positions [rows, tokens], times `scaling`, in `dtype`: [rows, tokens, 2 * n] each, with n
// `frequencies` (fp32, on the positions' device) twice, or once with `halves`. With the operators of transformers'
// code.
std::pair<at::Tensor, at::Tensor> rotary_tables(const at::Tensor& positions, const at::Tensor& frequencies,
                                                double scaling, c10::ScalarType dtype, bool halves = false);

}  // namespace roundpipe::models
