#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/arithmetic.h>
#include <roundpipe/ops/linear_cross_entropy.h>
#include <roundpipe/ops/projection.h>

namespace roundpipe::models {

using ops::kIgnoredLabel;
// Logits that take more than this are computed in chunks, unless a number of tokens is given.
inline constexpr int64_t kWholeLogitBytes = int64_t{16} << 20;

struct TokenLossOptions {
  bool mean = false;  // over the labels that count, instead of their sum
  // Tokens whose logits exist at a time, if there are more; 0: if all take more than kWholeLogitBytes, as many as
  // ops::linear_cross_entropy chooses; none: all.
  std::optional<int64_t> chunk_tokens;
  int64_t chunk_logit_bytes = 0;               // see ops::LinearCrossEntropyOptions
  Arithmetic arithmetic = kDefaultArithmetic;  // kFast: all tokens are one chunk where there would be none
};

// The labels that the tokens predict, in one row on `device`: each token has the label of the token after it, and the
// last of a row has none. `labels`: see token_loss().
at::Tensor predicted_labels(const at::Tensor& labels, c10::Device device);

// The cross-entropy of the labels, each of which belongs to the token before it. `hidden` [rows, tokens, width], `head`
// without an adapter, `labels` [rows, tokens], int64, on any device. It dispatches the operators of transformers'
// ForCausalLMLoss, or, in chunks, those of ops::linear_cross_entropy.
// `logits`: null, or set to those of all tokens, in the dtype of the projection; then nothing is computed in chunks.
at::Tensor token_loss(const at::Tensor& hidden, const ops::Projection& head, const at::Tensor& labels,
                      const TokenLossOptions& options, at::Tensor* logits = nullptr);

}  // namespace roundpipe::models
