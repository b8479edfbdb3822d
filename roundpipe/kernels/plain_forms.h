#pragma once

#include <optional>
#include <string_view>
#include <tuple>

#include <ATen/core/Tensor.h>

namespace roundpipe::kernels::plain {

// The operators below autograd by torch's own, for devices that run no kernels: fp32 inside and one rounding of each
// result, like the kernels, but the device's own order of sums, exponentials and memory in between. Arguments, which
// have been checked, and results are those of the schemas in operators.cpp. Thread safety: any thread.

std::tuple<at::Tensor, at::Tensor, at::Tensor> norm(const at::Tensor& input, const std::optional<at::Tensor>& residual,
                                                    const at::Tensor& weight, double eps);
std::tuple<at::Tensor, at::Tensor> norm_backward(const at::Tensor& normed_gradient,
                                                 const std::optional<at::Tensor>& sum_gradient, const at::Tensor& input,
                                                 const at::Tensor& weight, const at::Tensor& scales,
                                                 bool weight_trains);
at::Tensor turn(const at::Tensor& states, const at::Tensor& cos, const at::Tensor& sin, bool backward);
at::Tensor gate(const at::Tensor& first, const std::optional<at::Tensor>& up, std::optional<double> alpha,
                double limit);
std::tuple<at::Tensor, at::Tensor> gate_backward(const at::Tensor& gradient, const at::Tensor& first,
                                                 const std::optional<at::Tensor>& up, std::optional<double> alpha,
                                                 double limit);
at::Tensor token_losses(const at::Tensor& logits, const at::Tensor& labels, int64_t ignore_index, bool writes_gradient);
void add_to(const at::Tensor& sums, const at::Tensor& addends);
// Into contiguous `numbers`, with the kernels' bits; a few megabytes of them at a time.
void decode(const at::Tensor& codes, const at::Tensor& scales, std::string_view form, int64_t block,
            const at::Tensor& numbers);

}  // namespace roundpipe::kernels::plain
