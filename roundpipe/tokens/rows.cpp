#include <roundpipe/tokens/rows.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/tokens/packing.h>
#include <roundpipe/tokens/shuffle.h>

namespace roundpipe::tokens {

RowKind parse_row_kind(std::string_view name) {
  if (name == "packed") return RowKind::kPacked;
  if (name == "stream") return RowKind::kStream;
  if (name == "padded") return RowKind::kPadded;
  throw std::invalid_argument(concat("[tokens] rows are '", name, "', expected one of packed, stream and padded"));
}

Rows::Rows(const TokenFile& file, const std::vector<int64_t>& documents, int64_t length, RowKind kind)
    : length_(length), kind_(kind) {
  if (length < 2) {
    throw std::invalid_argument(concat("[tokens] a row has ", length, " tokens, expected at least 2"));
  }
  for (const int64_t document : documents) {
    const int64_t begin = file.begin(document), end = file.end(document);
    if (kind == RowKind::kStream) {
      pieces_.push_back({begin, end - begin});
      starts_.push_back(tokens_);
      tokens_ += end - begin;
      continue;
    }
    for (int64_t at = begin; at < end; at += length) {
      const int64_t tokens = std::min(length, end - at);
      if (tokens == 1) continue;  // it would predict nothing
      pieces_.push_back({at, tokens});
      tokens_ += tokens;
    }
  }
  if (kind == RowKind::kStream) {
    count_ = tokens_ / length;
    tokens_ = count_ * length;
  } else {
    if (kind == RowKind::kPacked) {
      pack();
    } else {
      starts_.resize(pieces_.size());
      std::iota(starts_.begin(), starts_.end(), int64_t{0});
    }
    count_ = static_cast<int64_t>(starts_.size());
    starts_.push_back(static_cast<int64_t>(pieces_.size()));
  }
  if (count_ == 0) {
    throw std::invalid_argument(concat("[tokens] the documents of ", file.path(), " make no row of ", length,
                                       " tokens, expected at least one; use shorter rows or more text"));
  }
}

Rows& Rows::operator=(Rows&& other) noexcept { return move_into(*this, std::move(other)); }

void Rows::pack() {
  std::vector<int64_t> lengths;
  for (const Piece& piece : pieces_) lengths.push_back(piece.tokens);
  const std::vector<std::vector<int64_t>> rows = assign_rows(lengths, length_);
  std::vector<Piece> ordered;
  ordered.reserve(pieces_.size());
  for (const std::vector<int64_t>& row : rows) {
    starts_.push_back(static_cast<int64_t>(ordered.size()));
    for (const int64_t piece : row) ordered.push_back(pieces_[static_cast<size_t>(piece)]);
  }
  pieces_ = std::move(ordered);
}

std::vector<Piece> Rows::row(int64_t index) const {
  require_not_moved_from(!pieces_.empty(), "set of rows");
  const auto place = static_cast<size_t>(index);
  if (kind_ != RowKind::kStream) return {pieces_.begin() + starts_.at(place), pieces_.begin() + starts_.at(place + 1)};
  std::vector<Piece> row;
  const int64_t begin = index * length_, end = begin + length_;
  auto document = static_cast<size_t>(std::ranges::upper_bound(starts_, begin) - starts_.begin()) - 1;
  for (int64_t at = begin; at < end; ++document) {
    const Piece& whole = pieces_[document];
    const int64_t skipped = at - starts_[document];
    const int64_t tokens = std::min(whole.tokens - skipped, end - at);
    row.push_back({whole.begin + skipped, tokens});
    at += tokens;
  }
  return row;
}

Parts part_documents(const TokenFile& file, int64_t held_out_tokens, uint64_t seed) {
  Parts parts;
  std::vector<char> is_held_out(static_cast<size_t>(file.documents()), 0);
  int64_t held = 0;
  const Shuffle order = held_out_order(file.documents(), std::to_string(seed));
  for (int64_t place = 0; held < held_out_tokens && place < order.count(); ++place) {
    const int64_t document = order.at(place);
    is_held_out[static_cast<size_t>(document)] = 1;
    held += file.end(document) - file.begin(document);
  }
  for (int64_t document = 0; document < file.documents(); ++document) {
    (is_held_out[static_cast<size_t>(document)] != 0 ? parts.held_out : parts.training).push_back(document);
  }
  if (parts.training.empty()) {
    throw std::invalid_argument(concat("[tokens] ", file.path(), " has ", file.tokens(), " tokens in ",
                                       file.documents(), " documents, of which ", held_out_tokens,
                                       " are to be held out, and nothing is left to train on; hold fewer out"));
  }
  return parts;
}

RowOrder::RowOrder(int64_t count, uint64_t seed, bool shuffles) : count_(count), seed_(seed), shuffles_(shuffles) {}

int64_t RowOrder::at(int64_t position) {
  if (!shuffles_) return position % count_;
  const int64_t epoch = position / count_;
  // It may have been moved from, which leaves no order.
  if (epoch != epoch_ || order_ == nullptr) {
    order_ = std::make_shared<Shuffle>(epoch_order(count_, std::to_string(seed_), epoch));
    epoch_ = epoch;
  }
  return order_->at(position % count_);
}

}  // namespace roundpipe::tokens
