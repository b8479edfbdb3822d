#pragma once

#include <functional>
#include <optional>

#include <ATen/core/Tensor.h>

#include <roundpipe/ops/weight.h>

namespace roundpipe::ops {

// A product with an encoded weight, by the weight's numbers.
struct ProductWay {
  // Of the input, with the bias added along all but the last dimension.
  std::function<at::Tensor(const at::Tensor& input, const at::Tensor& numbers, const std::optional<at::Tensor>& bias)>
      forward;
  // The input's gradient from that of the result.
  std::function<at::Tensor(const at::Tensor& gradient, const at::Tensor& numbers)> backward;
  bool autocasts = true;  // whether autocast casts the operands of such a product
};

// The numbers are decoded for the forward, and again for the backward. In between, only the encoded form is kept, and
// not the input either. Under autocast, numbers are cast each time. Any thread. REQUIRES: the weight is encoded.
at::Tensor encoded_product(const at::Tensor& input, const Weight& weight, ProductWay way,
                           const std::optional<at::Tensor>& bias = std::nullopt);

}  // namespace roundpipe::ops
