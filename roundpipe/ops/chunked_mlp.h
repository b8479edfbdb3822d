#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::ops {

// Computes each token of its result from the same token of its argument alone.
using TokenwiseBody = std::function<at::Tensor(const at::Tensor& tokens)>;

struct ChunkedMapOptions {
  // Tokens whose intermediate results exist at the same time.
  int64_t chunk_tokens = 0;
  // The dimension of the tokens, in the input and in the result; negative ones count from the end.
  int64_t dim = -2;
  // Give the body the same random numbers again when it is run for the backward pass.
  bool preserve_rng_state = true;
};

// body(input), computed chunk by chunk of tokens. Between forward and backward only the input and the result exist:
// the backward pass runs the body again, for one chunk at a time, and takes that chunk's gradients. Gradients of 16-bit
// parameters are summed over chunks in fp32 and rounded once; those of frozen parameters are not computed.
//
// `parameters` are all tensors beside its argument that the body computes with and that may need a gradient: what is
// missing here gets none. The body is called without autograd recording, and under autocast without its cache (which
// would keep weights that were cast without recording). The backward pass runs it in the forward's autocast state.
//
// The generators' states (the host's and the input's device's) are kept only for chunks in which the body has drawn.
//
// With at most chunk_tokens tokens this is just body(input), with autograd's own graph.
//
// Errors: std::invalid_argument for what does not fit together and, in the backward pass, if that was asked for a graph
// of its own (create_graph); else what the body throws. Hooks on the tensors of `parameters` themselves see each
// chunk's gradient and then the sum. Thread safety: that of the body.
at::Tensor chunked_map(const TokenwiseBody& body, const at::Tensor& input, const std::vector<at::Tensor>& parameters,
                       const ChunkedMapOptions& options);

enum class Activation : int { kSilu, kGelu, kGeluTanh, kRelu };

// "silu", "gelu", "gelu_tanh" or "relu".
Activation parse_activation(std::string_view name);

// A projection as at::linear takes it: weight [to, from], bias [to] or none.
struct Projection {
  at::Tensor weight;
  std::optional<at::Tensor> bias;
};

// down(activation(gate(input)) * up(input)), as in Shazeer, "GLU Variants Improve Transformer" (2020); input
// [..., width]. chunk_tokens > 0: by chunked_map over dimension -2.
at::Tensor gated_mlp(const at::Tensor& input, const Projection& gate, const Projection& up, const Projection& down,
                     Activation activation, int64_t chunk_tokens = 0);

// down(activation(up(input))); the rest as in gated_mlp.
at::Tensor two_layer_mlp(const at::Tensor& input, const Projection& up, const Projection& down, Activation activation,
                         int64_t chunk_tokens = 0);

}  // namespace roundpipe::ops
