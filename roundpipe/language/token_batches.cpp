#include <roundpipe/language/token_batches.h>

#include <algorithm>

#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <roundpipe/language/layers.h>

namespace roundpipe {

LanguageBatch read_batch(const tokens::TokenFile& file, const std::vector<std::vector<tokens::Piece>>& rows,
                         tokens::RowKind kind) {
  const auto length_of = [](const std::vector<tokens::Piece>& row) {
    int64_t tokens = 0;
    for (const tokens::Piece& piece : row) tokens += piece.tokens;
    return tokens;
  };
  int64_t longest = 0;
  for (const auto& row : rows) longest = std::max(longest, length_of(row));
  const std::vector<int64_t> shape = {static_cast<int64_t>(rows.size()), longest};
  const bool padded = kind == tokens::RowKind::kPadded;
  LanguageBatch batch;
  batch.ids = at::zeros(shape, at::kLong);
  batch.labels = at::full(shape, language::kIgnoredLabel, at::kLong);
  at::Tensor beside = at::zeros(shape, at::kLong);
  for (size_t row = 0; row < rows.size(); ++row) {
    const int64_t start = static_cast<int64_t>(row) * longest;
    int64_t* const ids = batch.ids.mutable_data_ptr<int64_t>() + start;
    int64_t* const labels = batch.labels.mutable_data_ptr<int64_t>() + start;
    int64_t* const numbers = beside.mutable_data_ptr<int64_t>() + start;
    int64_t at = 0;
    for (const tokens::Piece& piece : rows[row]) {
      file.read(piece.begin, piece.tokens, ids + at);
      std::copy(ids + at + 1, ids + at + piece.tokens, labels + at + 1);
      for (int64_t i = 0; i < piece.tokens; ++i) numbers[at + i] = padded ? 1 : i;
      at += piece.tokens;
    }
    for (int64_t i = at; i < longest && !padded; ++i) numbers[i] = i - at;
  }
  (padded ? batch.attention_mask : batch.positions) = beside;
  return batch;
}

}  // namespace roundpipe
