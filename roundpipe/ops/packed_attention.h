#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>

#include <roundpipe/ops/documents.h>

namespace roundpipe::ops {

// The width of heads up to which torch's SDPA has fast kernels for grouped heads.
inline constexpr int64_t kWidestGroupedHead = 256;

struct PackedAttentionOptions {
  double dropout = 0;
  std::optional<double> scaling;    // of the scores; none: 1 / sqrt(width)
  std::optional<double> softcap;    // the scores are bounded by cap * tanh(scores / cap)
  std::optional<at::Tensor> sinks;  // [heads]: a score that takes its share of the softmax and adds nothing
  int64_t queries_at_once = 1024;   // for a document longer than its window, or whose scores are computed here
  // What document_starts() makes of the same documents, on the query's device: all documents are computed in one call,
  // with other bits, if torch has a kernel for that there. It has one on CUDA, from Ampere on; and none for other
  // dtypes than fp16 and bf16, for heads wider than kWidestGroupedHead or of a width that 8 does not divide, and for
  // dropout, a softcap, sinks or a window.
  std::optional<at::Tensor> starts = std::nullopt;
};

// Where each document and each run of padding begins among the tokens of all rows, and where the last one ends: int32
// [n + 1], on the host.
at::Tensor document_starts(const Documents& documents);

// Causal attention within each document: query [rows, heads, tokens, width], key and value with as many heads or a
// divisor of that; returns [rows, tokens, heads, width], with zeros for padding. Documents of one length are computed
// together. With a softcap or sinks, the scores are computed here, some queries at a time, otherwise by torch's SDPA.
// Throws std::invalid_argument for documents of another batch.
// Thread safety: any thread; no state is kept between calls.
at::Tensor packed_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                            const Documents& documents, const PackedAttentionOptions& options = {});

}  // namespace roundpipe::ops
