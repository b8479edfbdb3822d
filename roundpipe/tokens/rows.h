#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include <roundpipe/tokens/token_file.h>

namespace roundpipe::tokens {

// How documents become rows. A document, or the end of one, that is a single token predicts nothing, and is left out of
// packed and padded rows.
enum class RowKind : int {
  kPacked,  // as few rows as best fit decreasing finds, each of whole documents; longer documents are cut
  kStream,  // one document behind the other, cut wherever a row is full; what fills no row at the end is left out
  kPadded,  // a row for each document; longer ones are cut into several
};

// "packed", "stream" or "padded". Throws std::invalid_argument for another name.
RowKind parse_row_kind(std::string_view name);

// A document of a row, or a part of one: tokens of the file.
struct Piece {
  int64_t begin = 0;
  int64_t tokens = 0;

  bool operator==(const Piece&) const = default;
};

// The rows of at most `length` tokens that documents make. They depend on nothing else, so a row has the same number
// in every run. Memory: 8 bytes a document for kStream, else 16 bytes a piece and 8 a row. row() of rows that were
// moved from throws std::invalid_argument. Never changes; any thread.
class Rows {
 public:
  // `documents`: numbers of documents of the file, ascending. Throws std::invalid_argument if they make no row.
  // The file is not kept.
  Rows(const TokenFile& file, const std::vector<int64_t>& documents, int64_t length, RowKind kind);
  Rows(const Rows&) = default;
  Rows& operator=(const Rows&) = default;
  Rows(Rows&&) = default;
  Rows& operator=(Rows&& other) noexcept;

  int64_t count() const { return count_; }
  int64_t length() const { return length_; }
  RowKind kind() const { return kind_; }
  // Tokens in all rows.
  int64_t tokens() const { return tokens_; }
  std::vector<Piece> row(int64_t index) const;

 private:
  void pack();

  int64_t length_;
  RowKind kind_;
  int64_t count_ = 0;
  int64_t tokens_ = 0;
  std::vector<Piece> pieces_;    // kStream: documents; else row after row
  std::vector<int64_t> starts_;  // kStream: tokens before each document; else the first piece of each row, and the end
};

// All documents of a file, parted by chance: at least `held_out_tokens` tokens in as few documents as come first in an
// order that depends on the seed and the number of documents alone, and the rest. Throws std::invalid_argument if
// nothing would be left to train on.
struct Parts {
  std::vector<int64_t> training;
  std::vector<int64_t> held_out;
};
Parts part_documents(const TokenFile& file, int64_t held_out_tokens, uint64_t seed = 0);

class Shuffle;

// The order in which rows are used: epoch after epoch, each in an order of its own that depends on `seed` and the
// epoch's number alone; or as they are. A position is the number of rows used so far, so a run that resumes needs only
// that. Python's batches have the same order of their samples. Thread safety: one thread.
class RowOrder {
 public:
  // REQUIRES: count > 0.
  RowOrder(int64_t count, uint64_t seed, bool shuffles);
  // The row at a position.
  int64_t at(int64_t position);

 private:
  const int64_t count_;
  const uint64_t seed_;
  const bool shuffles_;
  int64_t epoch_ = -1;
  std::shared_ptr<const Shuffle> order_;  // of epoch_
};

}  // namespace roundpipe::tokens
