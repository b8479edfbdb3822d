#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/arithmetic.h>
#include <roundpipe/ops/projection.h>

namespace roundpipe::ops {

// Computes each token of its result only from the same token of its argument.
using TokenwiseBody = std::function<at::Tensor(const at::Tensor& tokens)>;

struct ChunkedMapOptions {
  // The number of tokens whose intermediate results exist at the same time.
  int64_t chunk_tokens = 0;
  // The dimension of the tokens, in the input and in the result; a negative one counts from the end.
  int64_t dim = -2;
  // Whether the body gets the same random numbers again when it runs for the backward pass.
  bool preserve_rng_state = true;
  // If nobody reads the result: the size of its last dimension. Its values may then be any, and the body runs for the
  // backward pass only, unless states of generators have to be kept.
  std::optional<int64_t> unread_width = std::nullopt;
  // What the backward pass runs in place of the body, since nobody reads the values of its result there: the same
  // graph, with fewer products. Null: the body.
  TokenwiseBody unread_body = nullptr;
};

// Computes body(input) chunk by chunk of tokens. Between forward and backward, only the input and the result exist: the
// backward pass recomputes the body for one chunk at a time and takes the chunk's gradients. Gradients of 16-bit
// parameters are summed over chunks in fp32 and rounded once. Gradients of frozen parameters are not computed.
//
// `parameters` are all tensors, besides its argument, that the body uses and that may need a gradient; others get none.
// The forward runs the body without autograd recording and, under autocast, without autocast's cache (which would keep
// weights that were cast without recording). The backward pass runs it in the forward's autocast state.
//
// The states of the generators (of the host and of the input's device) are kept only for chunks in which the body has
// drawn random numbers.
//
// With at most chunk_tokens tokens, this is just body(input), with autograd's own graph.
//
// Errors: std::invalid_argument for arguments that do not match and, in the backward pass, for create_graph; otherwise
// the body's exceptions. Hooks on the tensors in `parameters` see each chunk's gradient and then the sum.
// Thread safety: that of the body.
at::Tensor chunked_map(const TokenwiseBody& body, const at::Tensor& input, const std::vector<at::Tensor>& parameters,
                       const ChunkedMapOptions& options);

enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu };

// "silu", "gelu", "gelu_tanh" or "relu".
Activation parse_activation(std::string_view name);

at::Tensor activate(const at::Tensor& input, Activation activation);

// activation(gate) * up, of tensors of one shape; without `up`, `gate` has both as the halves of its last dimension.
at::Tensor activated_product(const at::Tensor& gate, const std::optional<at::Tensor>& up, Activation activation,
                             Arithmetic arithmetic);

// Computes down(activation(gate(input)) * up(input)), as in Shazeer, "GLU Variants Improve Transformer" (2020), for an
// input [..., width]. If chunk_tokens > 0, uses chunked_map over dimension -2. `is_read`: see project().
at::Tensor gated_mlp(const at::Tensor& input, const Projection& gate, const Projection& up, const Projection& down,
                     Activation activation, int64_t chunk_tokens = 0, bool is_read = true,
                     Arithmetic arithmetic = kDefaultArithmetic);

// Computes down(activation(up(input))), otherwise like gated_mlp.
at::Tensor two_layer_mlp(const at::Tensor& input, const Projection& up, const Projection& down, Activation activation,
                         int64_t chunk_tokens = 0);

}  // namespace roundpipe::ops
