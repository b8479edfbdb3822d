#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::ops {

// A LoRA adapter beside a projection, as PEFT's: what it adds is scaling * (input down^T) up^T.
struct LowRankAdapter {
  at::Tensor down;  // [rank, from]
  at::Tensor up;    // [to, rank]
  double scaling = 1;
};

// A projection in the form of at::linear: weight [to, from], bias [to] or none.
struct Projection {
  at::Tensor weight;
  std::optional<at::Tensor> bias = std::nullopt;
  std::optional<LowRankAdapter> adapter = std::nullopt;
};

// Applies a projection to [..., from]. An adapter computes in its own dtype, and the sum is cast to the projection's;
// the operators are those of PEFT's plain Linear without dropout. Any thread.
at::Tensor project(const at::Tensor& input, const Projection& projection);

// The tensors of a projection.
std::vector<at::Tensor> parameters_of(const Projection& projection);

}  // namespace roundpipe::ops
