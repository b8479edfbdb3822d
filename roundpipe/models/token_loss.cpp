#include <roundpipe/models/token_loss.h>

#include <algorithm>

#include <ATen/Functions.h>
#include <ATen/core/Reduction.h>

#include <roundpipe/kernels/kernels.h>

namespace roundpipe::models {

using at::Tensor;

namespace {

bool in_chunks(const TokenLossOptions& options, int64_t tokens, int64_t vocabulary) {
  if (!options.chunk_tokens) return false;
  if (*options.chunk_tokens > 0) return tokens > *options.chunk_tokens;
  return tokens * vocabulary * static_cast<int64_t>(sizeof(float)) > kWholeLogitBytes;
}

}  // namespace

Tensor predicted_labels(const Tensor& labels, c10::Device device) {
  return at::constant_pad_nd(labels, {0, 1}, kIgnoredLabel).slice(-1, 1).contiguous().view({-1}).to(device);
}

Tensor token_loss(const Tensor& hidden, const ops::Projection& head, const Tensor& labels,
                  const TokenLossOptions& options, Tensor* logits) {
  const Tensor shifted = predicted_labels(labels, hidden.device());
  const int64_t vocabulary = head.weight.size(0);
  const bool chunked = in_chunks(options, shifted.numel(), vocabulary);
  const bool is_fused = options.arithmetic == Arithmetic::kFast && kernels::takes(hidden.scalar_type());
  if (logits == nullptr && (chunked || is_fused)) {
    ops::LinearCrossEntropyOptions chunks;
    chunks.ignore_index = kIgnoredLabel;
    chunks.chunk_tokens = chunked ? *options.chunk_tokens : std::max<int64_t>(1, shifted.numel());
    chunks.arithmetic = options.arithmetic;
    chunks.sums_products = true;
    chunks.chunk_logit_bytes = options.chunk_logit_bytes;
    const Tensor sum = ops::linear_cross_entropy(hidden.reshape({-1, hidden.size(-1)}), head.weight.values(), head.bias,
                                                 shifted, chunks)
                           .sum;
    if (!options.mean) return sum;
    const Tensor count = shifted.ne(kIgnoredLabel).sum();
    return sum.div(chunked ? count.clamp(1) : count);  // of no labels, NaN as without chunks
  }
  const Tensor all = at::linear(hidden, head.weight.values(), head.bias);
  if (logits != nullptr) *logits = all;
  return at::cross_entropy_loss(all.to(at::kFloat).view({-1, vocabulary}), shifted, {},
                                options.mean ? at::Reduction::Mean : at::Reduction::Sum, kIgnoredLabel);
}

}  // namespace roundpipe::models
