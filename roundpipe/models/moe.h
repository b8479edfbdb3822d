#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/arithmetic.h>
#include <roundpipe/models/implementations.h>
#include <roundpipe/ops/chunked_mlp.h>

namespace roundpipe::models {

// The gate of GPT-OSS: with both inputs bounded by `limit` (`gate` from above only), (up + 1) * gate * sigmoid(alpha *
// gate).
struct ClampedGate {
  double alpha = 0;
  double limit = 0;
};

// How each token's weights are made from the router's scores. kSoftmaxOfAll: the probabilities of the chosen experts;
// kNormalized: these, divided by their sum; kSoftmaxOfChosen: a softmax over the scores of the chosen experts.
enum class Shares : int { kSoftmaxOfAll, kNormalized, kSoftmaxOfChosen };

// "softmax_of_all", "normalized" or "softmax_of_chosen". Throws std::invalid_argument for another name.
Shares parse_shares(std::string_view name);

// A router gives each token the top_k of the experts, which are gated MLPs; the token's result is the sum of their
// outputs, weighted by the token's shares.
struct MoeConfig {
  int64_t top_k = 0;
  Shares shares = Shares::kSoftmaxOfAll;
  ops::Activation activation = ops::Activation::kSilu;  // of the gate, unless it is `clamped`
  std::optional<ClampedGate> clamped;                   // then gate and up alternate, and matrices are [from, to]
};

// Handles of the weights. The number of experts is the first size of each. An undefined bias is one that the experts
// have not.
struct MoeWeights {
  ops::Projection router;        // [experts, width]
  ops::Weight gate_up;           // [experts, 2 * inner, width]: the gate's rows, then the other's
  ops::Weight down;              // [experts, width, inner]
  at::Tensor gate_up_bias = {};  // [experts, 2 * inner]
  at::Tensor down_bias = {};     // [experts, width]
};

// Computes the mixture for hidden states [rows, tokens, width]. It dispatches the operators that transformers' code
// dispatches, in the same order and dtypes, so values and gradients have the same bits; in fast arithmetic, gates are
// fused kernels. kEager copies the experts' token counts to the host, once; the others never wait for the device where
// torch has grouped kernels.
// `router_logits`: null, or set to the router's scores [rows * tokens, experts] before the softmax.
// Thread safety: any thread; no state is kept between calls. Errors: torch's own for shapes that do not match.
at::Tensor mixture_of_experts(const MoeConfig& config, const MoeWeights& weights, Experts experts,
                              const at::Tensor& hidden, at::Tensor* router_logits = nullptr,
                              Arithmetic arithmetic = kDefaultArithmetic);

}  // namespace roundpipe::models
