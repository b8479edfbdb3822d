#include <roundpipe/ops/documents.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <stdexcept>
#include <string>
#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/ops/linear_cross_entropy.h>

namespace roundpipe::ops {

using at::Tensor;

namespace {

using Lengths = std::vector<int64_t>;

// Ends documents where positions do not increase by one.
void split(std::vector<Lengths>& rows, const Tensor& positions, int64_t tokens) {
  const Tensor placed =
      positions.to(at::kCPU, at::kLong).expand({static_cast<int64_t>(rows.size()), tokens}).contiguous();
  const int64_t* numbers = placed.const_data_ptr<int64_t>();
  for (Lengths& row : rows) {
    Lengths parts;
    int64_t begin = 0;
    for (const int64_t length : row) {
      const int64_t end = begin + std::abs(length);
      int64_t from = begin;
      for (int64_t token = begin + 1; length > 0 && token < end; ++token) {
        if (numbers[token] == numbers[token - 1] + 1) continue;
        parts.push_back(token - from);
        from = token;
      }
      parts.push_back(length > 0 ? end - from : length);
      begin = end;
    }
    row = std::move(parts);
    numbers += tokens;
  }
}

bool any_row(const Documents& documents, bool (*holds)(const Lengths&)) {
  return std::ranges::any_of(documents.rows, holds);
}

bool is_padding(int64_t length) { return length < 0; }

}  // namespace

Documents find_documents(const Tensor& attention_mask, const Tensor& positions, int64_t rows, int64_t tokens,
                         const Tensor& labels) {
  Documents documents;
  if (!attention_mask.defined()) {
    documents.rows.assign(static_cast<size_t>(rows), {tokens});
  } else {
    const Tensor kept = attention_mask.to(at::kCPU, at::kBool).contiguous();
    for (int64_t row = 0; row < rows; ++row) {
      const bool* const keeps = kept.const_data_ptr<bool>() + row * tokens;
      Lengths& runs = documents.rows.emplace_back();
      for (int64_t begin = 0; begin < tokens;) {
        const int64_t length = std::find(keeps + begin, keeps + tokens, !keeps[begin]) - (keeps + begin);
        runs.push_back(keeps[begin] ? length : -length);
        begin += length;
      }
    }
  }
  if (positions.defined()) split(documents.rows, positions, tokens);
  if (labels.defined() && has_padding(documents) && is_right_padded(documents)) {
    const Tensor counts = labels.to(at::kCPU).ne(kIgnoredLabel).logical_and(attention_mask.to(at::kCPU).eq(0));
    documents.padding_is_unread = !counts.any().item<bool>();
  }
  return documents;
}

Documents read_documents(const Tensor& table, const std::optional<Tensor>& positions, int64_t rows, int64_t tokens) {
  const Tensor described = table.to(at::kCPU, at::kLong).contiguous();
  Documents documents;
  for (int64_t row = 0; row < described.size(0); ++row) {
    const int64_t* const numbers = described.const_data_ptr<int64_t>() + row * described.size(1);
    if (row == 0) documents.window = numbers[0];
    Lengths& lengths = documents.rows.emplace_back();
    std::copy_if(numbers + 1, numbers + described.size(1), std::back_inserter(lengths),
                 [](int64_t length) { return length != 0; });
  }
  check_documents(documents, rows, tokens);
  if (positions && positions->dim() == 2) split(documents.rows, *positions, tokens);
  return documents;
}

Documents with_window(const Documents& documents, int64_t window) {
  Documents windowed = documents;
  windowed.window = window;
  return windowed;
}

void check_documents(const Documents& documents, int64_t rows, int64_t tokens) {
  bool fits = static_cast<int64_t>(documents.rows.size()) == rows;
  std::string shown;
  for (const Lengths& row : documents.rows) {
    int64_t size = 0;
    for (const int64_t length : row) size += std::abs(length);
    fits &= size == tokens;
    shown += concat(shown.empty() ? "" : ", ", size);
  }
  if (fits) return;
  throw std::invalid_argument(concat("[sdpa_packed] the documents of the mask have [", shown, "] tokens, expected ",
                                     tokens, " in each of ", rows,
                                     " rows; a mask of two dimensions may hold only zeros and ones"));
}

bool has_padding(const Documents& documents) {
  return any_row(documents, [](const Lengths& row) { return std::ranges::any_of(row, is_padding); });
}

bool has_inner_padding(const Documents& documents) {
  return any_row(documents, [](const Lengths& row) {
    return row.size() > 2 && std::any_of(row.begin() + 1, row.end() - 1, is_padding);
  });
}

bool is_right_padded(const Documents& documents) {
  return std::ranges::all_of(documents.rows, [](const Lengths& row) {
    return row.size() < 2 || (row.size() == 2 && !is_padding(row.front()) && is_padding(row.back()));
  });
}

bool has_several(const Documents& documents) {
  return any_row(documents, [](const Lengths& row) { return row.size() - std::ranges::count_if(row, is_padding) > 1; });
}

}  // namespace roundpipe::ops
