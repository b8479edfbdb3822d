#include <roundpipe/ops/packed_attention.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/SDPBackend.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace roundpipe::ops {

using at::Tensor;

namespace {

struct Span {
  int64_t begin = 0;
  int64_t end = 0;
};

Tensor part_of(const Tensor& tensor, int64_t dim, Span span) {
  if (span.begin == 0 && span.end == tensor.size(dim)) return tensor;
  return tensor.slice(dim, span.begin, span.end);
}

Tensor repeated(const Tensor& heads, int64_t groups) {
  return groups == 1 ? heads : heads.repeat_interleave(groups, 1);
}

// Queries from `first` on, some at a time, and the keys that any of them sees.
std::vector<std::pair<Span, Span>> bands(int64_t first, int64_t tokens, int64_t window, int64_t queries_at_once) {
  std::vector<std::pair<Span, Span>> found;
  const int64_t step = std::min(window, queries_at_once);
  for (int64_t begin = first; begin < tokens; begin += step) {
    const int64_t end = std::min(begin + step, tokens);
    found.push_back({{begin, end}, {std::max<int64_t>(0, begin - window + 1), end}});
  }
  return found;
}

// [queries, keys], true where a query sees a key: itself and the `window` - 1 tokens before.
Tensor band(Span queries, Span keys, int64_t window, const Tensor& like) {
  const auto options = at::TensorOptions(at::kLong).device(like.device());
  const Tensor distance = at::arange(queries.begin, queries.end, options).unsqueeze(1) -
                          at::arange(keys.begin, keys.end, options).unsqueeze(0);
  return distance.ge(0).logical_and(distance.lt(window));
}

Tensor by_sdpa(const Tensor& query, Tensor key, Tensor value, int64_t window, const PackedAttentionOptions& options) {
  const int64_t groups = query.size(1) / key.size(1);
  const int64_t tokens = query.size(2);
  const bool grouped = groups > 1 && key.size(-1) == value.size(-1) && key.size(-1) <= kWidestGroupedHead;
  if (!grouped) {
    key = repeated(key, groups);
    value = repeated(value, groups);
  }
  const auto sdpa = [&](Span queries, Span keys, const std::optional<Tensor>& mask) {
    return at::scaled_dot_product_attention(part_of(query, 2, queries), part_of(key, 2, keys), part_of(value, 2, keys),
                                            mask, options.dropout, /*is_causal=*/!mask, options.scaling, grouped);
  };
  if (window <= 0 || window >= tokens) return sdpa({0, tokens}, {0, key.size(2)}, std::nullopt);
  std::vector<Tensor> outputs = {sdpa({0, window}, {0, window}, std::nullopt)};  // there, it is plainly causal
  for (const auto& [queries, keys] : bands(window, tokens, window, options.queries_at_once)) {
    outputs.push_back(sdpa(queries, keys, band(queries, keys, window, query)));
  }
  return at::cat(outputs, 2);
}

Tensor by_scores(const Tensor& query, const Tensor& given_key, const Tensor& given_value, int64_t window,
                 const PackedAttentionOptions& options) {
  const int64_t groups = query.size(1) / given_key.size(1);
  const int64_t tokens = query.size(2);
  const Tensor key = repeated(given_key, groups);
  const Tensor value = repeated(given_value, groups);
  const double scale = options.scaling.value_or(1 / std::sqrt(static_cast<double>(query.size(-1))));
  const int64_t reach = window == 0 ? tokens : window;
  std::vector<Tensor> outputs;
  for (const auto& [queries, keys] : bands(0, tokens, reach, options.queries_at_once)) {
    Tensor scores = at::matmul(part_of(query, 2, queries), part_of(key, 2, keys).transpose(-1, -2)) * scale;
    if (options.softcap) scores = at::tanh(scores / *options.softcap) * *options.softcap;
    scores =
        scores.masked_fill(band(queries, keys, reach, query).logical_not(), -std::numeric_limits<double>::infinity());
    if (options.sinks) {
      const Tensor sink = options.sinks->to(scores.scalar_type()).reshape({1, -1, 1, 1});
      scores = at::cat({scores, sink.expand({scores.size(0), -1, scores.size(2), 1})}, -1);
    }
    Tensor weights = at::softmax(scores, -1, at::kFloat).to(query.scalar_type());
    if (options.sinks) weights = weights.slice(-1, 0, -1);
    outputs.push_back(at::matmul(at::dropout(weights, options.dropout, /*train=*/true), part_of(value, 2, keys)));
  }
  return at::cat(outputs, 2);
}

const c10::OperatorName kOneCall("aten::_flash_attention_forward", "");

bool has_one_call(const Tensor& query, const Tensor& key, const Tensor& value, const Documents& documents,
                  const PackedAttentionOptions& options) {
  constexpr int64_t kWidthStep = 8;  // torch's SDPA pads other widths, this operator does not
  const bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool is_narrow = query.size(-1) <= kWidestGroupedHead && query.size(-1) == value.size(-1);
  if (!options.starts || !is_half || !is_narrow || documents.window > 0) return false;
  if (options.dropout > 0 || options.softcap || options.sinks) return false;
  if (query.size(-1) % kWidthStep != 0) return false;
  const std::optional<c10::OperatorHandle> found = c10::Dispatcher::singleton().findSchema(kOneCall);
  if (!found || !found->hasKernelForDispatchKey(query.options().computeDispatchKey())) return false;
  // Cards that are too old have the kernel as well, but torch chooses another one there.
  const auto choice = static_cast<at::SDPBackend>(at::_fused_sdp_choice(
      query, key, value, std::nullopt, 0, /*is_causal=*/true, options.scaling, query.size(1) != key.size(1)));
  return choice == at::SDPBackend::flash_attention || choice == at::SDPBackend::cudnn_attention;
}

// All documents of all rows in one call of torch's flash attention, in which padding attends to itself.
Tensor in_one_call(const Tensor& query, const Tensor& key, const Tensor& value, const Documents& documents,
                   const PackedAttentionOptions& options) {
  const auto flat = [](const Tensor& heads) { return heads.transpose(1, 2).flatten(0, 1); };
  int64_t longest = 0;
  for (const std::vector<int64_t>& row : documents.rows) {
    for (const int64_t length : row) longest = std::max(longest, std::abs(length));
  }
  const Tensor outputs = std::get<0>(at::_flash_attention_forward(
      flat(query), flat(key), flat(value), *options.starts, *options.starts, longest, longest, /*dropout_p=*/0,
      /*is_causal=*/true, /*return_debug_mask=*/false, options.scaling));
  const std::vector<int64_t> shape = {query.size(0), query.size(2), query.size(1), value.size(-1)};
  if (!has_padding(documents)) return outputs.view(shape);
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (const std::vector<int64_t>& row : documents.rows) {
    for (const int64_t length : row) {
      const Tensor part = outputs.narrow(0, begin, std::abs(length));
      parts.push_back(length < 0 ? at::zeros_like(part) : part);
      begin += std::abs(length);
    }
  }
  return at::cat(parts).view(shape);
}

// One document or run of padding: its row and where it begins.
struct Place {
  size_t row = 0;
  int64_t begin = 0;
};

}  // namespace

Tensor document_starts(const Documents& documents) {
  std::vector<int32_t> starts = {0};
  for (const std::vector<int64_t>& row : documents.rows) {
    for (const int64_t length : row) starts.push_back(starts.back() + static_cast<int32_t>(std::abs(length)));
  }
  return at::tensor(starts, at::kInt);
}

Tensor packed_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Documents& documents,
                        const PackedAttentionOptions& options) {
  const int64_t tokens = query.size(2);
  check_documents(documents, query.size(0), tokens);
  if (has_one_call(query, key, value, documents, options)) return in_one_call(query, key, value, documents, options);
  const auto attend = [&](const Tensor& queries, const Tensor& keys, const Tensor& values) {
    return options.softcap || options.sinks ? by_scores(queries, keys, values, documents.window, options)
                                            : by_sdpa(queries, keys, values, documents.window, options);
  };
  const std::vector<int64_t> whole = {tokens};
  if (std::ranges::all_of(documents.rows, [&](const auto& row) { return row == whole; })) {
    return attend(query, key, value).transpose(1, 2).contiguous();
  }
  // Documents of equal length run together, in the order in which the lengths appear. One concatenation puts the pieces
  // back, so that the backward needs no buffer of the row's size for each piece.
  std::vector<std::pair<int64_t, std::vector<Place>>> lengths;
  for (size_t row = 0; row < documents.rows.size(); ++row) {
    int64_t begin = 0;
    for (const int64_t length : documents.rows[row]) {
      auto known = std::ranges::find(lengths, length, &std::pair<int64_t, std::vector<Place>>::first);
      if (known == lengths.end()) known = lengths.insert(known, {length, {}});
      known->second.push_back({row, begin});
      begin += std::abs(length);
    }
  }
  std::map<std::pair<size_t, int64_t>, Tensor> pieces;
  for (const auto& [length, places] : lengths) {
    if (length < 0) {
      const Tensor nothing = value.new_zeros({1, query.size(1), -length, value.size(-1)});
      for (const Place& place : places) pieces[{place.row, place.begin}] = nothing;
      continue;
    }
    const auto cut = [&, length = length, &places = places](const Tensor& tensor) {
      std::vector<Tensor> parts;
      for (const auto [row, begin] : places) {
        const auto first = static_cast<int64_t>(row);
        parts.push_back(part_of(part_of(tensor, 0, {first, first + 1}), 2, {begin, begin + length}));
      }
      return at::cat(parts);
    };
    const Tensor queries = cut(query);
    const Tensor keys = cut(key);
    const Tensor outputs = attend(queries, keys, cut(value));
    const std::vector<Tensor> each = outputs.chunk(static_cast<int64_t>(places.size()));
    for (size_t i = 0; i < places.size(); ++i) pieces[{places[i].row, places[i].begin}] = each[i];
  }
  std::vector<Tensor> rows;
  for (size_t row = 0; row < documents.rows.size(); ++row) {
    std::vector<Tensor> parts;
    int64_t begin = 0;
    for (const int64_t length : documents.rows[row]) {
      parts.push_back(pieces.at({row, begin}));
      begin += std::abs(length);
    }
    rows.push_back(at::cat(parts, 2));
  }
  return at::cat(rows).transpose(1, 2).contiguous();
}

}  // namespace roundpipe::ops
