#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::ops {

// The width of heads up to which torch's SDPA has fast kernels for grouped heads.
inline constexpr int64_t kWidestGroupedHead = 256;

// The documents of each row of a batch, in order; a run of padding as its negative length.
struct Documents {
  int64_t window = 0;  // tokens that a token sees, itself included; 0: all before it
  std::vector<std::vector<int64_t>> rows;
};

// Reads the documents from a mask [rows, 1 + n], on any device: the window, then each row's lengths, then zeros. A
// document also ends where `positions` [rows or 1, tokens] do not increase by one. Waits for the tensors' device.
// Throws std::invalid_argument unless there are `rows` rows of `tokens` tokens.
Documents read_documents(const at::Tensor& mask, const std::optional<at::Tensor>& positions, int64_t rows,
                         int64_t tokens);

struct PackedAttentionOptions {
  double dropout = 0;
  std::optional<double> scaling;    // of the scores; none: 1 / sqrt(width)
  std::optional<double> softcap;    // the scores are bounded by cap * tanh(scores / cap)
  std::optional<at::Tensor> sinks;  // [heads]: a score that takes its share of the softmax and adds nothing
  int64_t queries_at_once = 1024;   // for a document longer than its window, or whose scores are computed here
};

// Causal attention within each document: query [rows, heads, tokens, width], key and value with as many heads or a
// divisor of that; returns [rows, tokens, heads, width], with zeros for padding. Documents of one length are computed
// together. With a softcap or sinks, the scores are computed here, some queries at a time, otherwise by torch's SDPA.
// Thread safety: any thread; no state is kept between calls.
at::Tensor packed_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const Documents& documents, const PackedAttentionOptions& options = {});

}  // namespace roundpipe::ops
