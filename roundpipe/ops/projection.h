#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/ops/weight.h>

namespace roundpipe::ops {

// A LoRA adapter beside a projection (Hu et al., "LoRA", 2021): what it adds is
// scaling * up(down(dropout(input))).
struct LowRankAdapter {
  at::Tensor down;  // [rank, from]
  at::Tensor up;    // [to, rank]
  std::optional<at::Tensor> up_bias = std::nullopt;
  double scaling = 1;
  double dropout = 0;     // of its input
  bool training = false;  // whether it drops
};

// A projection in the form of at::linear: weight [to, from], bias [to] or none.
struct Projection {
  Weight weight;
  std::optional<at::Tensor> bias = std::nullopt;
  std::optional<LowRankAdapter> adapter = std::nullopt;
};

// How a projection is applied.
struct ProjectionUse {
  // Whether somebody reads the result; if not, it has a shape and a graph, whose gradients have the same bits, but no
  // values where these would take a product.
  bool is_read = true;
  // Whether a 16-bit weight's gradient may be added to the sum of its torch_compat::GradientConsumer as a product,
  // which is not rounded first where the device has such products: for layers that take no gradients of their own.
  bool sums_products = false;
};

// Applies a projection to [..., from]. An adapter computes in its own dtype, and the sum is cast to the projection's;
// the operators and their order are those of PEFT's plain Linear. Any thread.
at::Tensor project(const at::Tensor& input, const Projection& projection, const ProjectionUse& use = {});

// input @ numbers^T + bias of an encoded weight [to, from], as at::linear computes it with the decoded one;
// see encoded_product(). REQUIRES: the weight is encoded.
at::Tensor encoded_linear(const at::Tensor& input, const Weight& weight, const std::optional<at::Tensor>& bias,
                          bool is_read = true);

// input @ weight, as at::matmul computes it: of [rows, from] and [from, to].
at::Tensor times(const at::Tensor& input, const Weight& weight);

// Memory whose values nobody reads, of the shape that a projection of `input` to `width` has.
at::Tensor without_values(const at::Tensor& input, int64_t width);

// Whether project() draws random numbers: for an adapter that drops.
bool draws_numbers(const Projection& projection);

// The tensors of a projection.
std::vector<at::Tensor> parameters_of(const Projection& projection);

}  // namespace roundpipe::ops
