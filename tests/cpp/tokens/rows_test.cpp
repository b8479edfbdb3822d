#include <roundpipe/tokens/rows.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include <doctest/doctest.h>

#include "token_writer.h"

namespace roundpipe::tokens {
namespace {

using Pieces = std::vector<Piece>;

// Documents of these lengths.
std::string file_of(const TemporaryFolder& folder, const std::vector<int64_t>& lengths) {
  std::vector<std::vector<uint16_t>> documents;
  for (const int64_t length : lengths) documents.emplace_back(static_cast<size_t>(length), uint16_t{1});
  return write_bytes(folder / "lengths.tokens", token_bytes<uint16_t>(documents, 2));
}

std::vector<int64_t> all_of(const TokenFile& file) {
  std::vector<int64_t> documents(static_cast<size_t>(file.documents()));
  std::iota(documents.begin(), documents.end(), 0);
  return documents;
}

std::vector<Pieces> rows_of(const Rows& rows) {
  std::vector<Pieces> all;
  for (int64_t i = 0; i < rows.count(); ++i) all.push_back(rows.row(i));
  return all;
}

TEST_CASE("rows: packed by best fit decreasing, long documents cut") {
  const TemporaryFolder folder;
  const TokenFile file(file_of(folder, {3, 12, 2, 4, 1}));
  const Rows rows(file, all_of(file), 5, RowKind::kPacked);
  // Pieces: 3 | 5, 5, 2 | 2 | 4. The 3 takes the first 2, and the single token predicts nothing.
  CHECK(rows_of(rows) == std::vector<Pieces>{{{0, 3}, {13, 2}}, {{3, 5}}, {{8, 5}}, {{15, 2}}, {{17, 4}}});
  CHECK(rows.tokens() == 21);
}

TEST_CASE("rows: a stream is cut where a row is full, over the documents that were named") {
  const TemporaryFolder folder;
  const TokenFile file(file_of(folder, {3, 12, 2, 4, 1}));
  const Rows rows(file, {0, 1, 3, 4}, 6, RowKind::kStream);
  CHECK(rows_of(rows) == std::vector<Pieces>{{{0, 3}, {3, 3}}, {{6, 6}}, {{12, 3}, {17, 3}}});
  CHECK(rows.tokens() == 18);
  CHECK_THROWS_WITH_AS(Rows(file, {0, 2}, 6, RowKind::kStream), doctest::Contains("make no row of 6 tokens"),
                       std::invalid_argument);
}

TEST_CASE("rows: one document each") {
  const TemporaryFolder folder;
  const TokenFile file(file_of(folder, {3, 7}));
  CHECK_THROWS_AS(Rows(TokenFile(file_of(folder, {1})), {0}, 5, RowKind::kPadded), std::invalid_argument);
  CHECK(rows_of(Rows(file, {0, 1}, 5, RowKind::kPadded)) == std::vector<Pieces>{{{0, 3}}, {{3, 5}}, {{8, 2}}});
}

TEST_CASE("rows: every token of random documents is in one row") {
  const TemporaryFolder folder;
  std::vector<int64_t> lengths;
  for (int64_t number = 0; number < 300; ++number) lengths.push_back(2 + 16 * (number * 7 % 3) + number * 11 % 14);
  const TokenFile file(file_of(folder, lengths));
  for (const RowKind kind : {RowKind::kPacked, RowKind::kStream, RowKind::kPadded}) {
    const Rows rows(file, all_of(file), 16, kind);
    std::vector<int64_t> seen(static_cast<size_t>(file.tokens()), 0);
    for (const Pieces& row : rows_of(rows)) {
      int64_t tokens = 0;
      for (const Piece& piece : row) {
        tokens += piece.tokens;
        for (int64_t i = 0; i < piece.tokens; ++i) ++seen[static_cast<size_t>(piece.begin + i)];
      }
      CHECK((kind == RowKind::kStream ? tokens == 16 : tokens <= 16));
    }
    const auto once = std::ranges::count(seen, 1);
    CHECK(once == rows.tokens());
    CHECK(once > file.tokens() - 16);
    CHECK(std::ranges::count(seen, 0) == file.tokens() - once);
  }
}

TEST_CASE("rows: held-out documents") {
  const TemporaryFolder folder;
  const TokenFile file(file_of(folder, std::vector<int64_t>(40, 5)));
  const Parts parts = part_documents(file, 52);
  CHECK(parts.held_out.size() == 11);
  CHECK(parts.training.size() == 29);
  CHECK(std::ranges::is_sorted(parts.held_out));
  std::vector<int64_t> both = parts.training;
  both.insert(both.end(), parts.held_out.begin(), parts.held_out.end());
  std::ranges::sort(both);
  CHECK(both == all_of(file));
  CHECK(parts.held_out.back() - parts.held_out.front() > 11);  // from all over the file
  CHECK(part_documents(file, 52, 0).held_out == parts.held_out);
  CHECK(part_documents(file, 52, 1).held_out != parts.held_out);
  CHECK(part_documents(file, 0).held_out.empty());
  CHECK_THROWS_WITH_AS(part_documents(file, 199), doctest::Contains("nothing is left to train on"),
                       std::invalid_argument);
}

TEST_CASE("rows: each epoch has an order of its own, from any position") {
  RowOrder order(7, 3, true), resumed(7, 3, true), other(7, 4, true), plain(7, 3, false);
  std::vector<std::vector<int64_t>> epochs(3);
  for (int64_t position = 0; position < 21; ++position) {
    epochs[static_cast<size_t>(position / 7)].push_back(order.at(position));
    CHECK(plain.at(position) == position % 7);
  }
  for (auto& epoch : epochs) {
    auto sorted = epoch;
    std::ranges::sort(sorted);
    CHECK(sorted == std::vector<int64_t>{0, 1, 2, 3, 4, 5, 6});
  }
  CHECK(epochs[0] != epochs[1]);
  CHECK(epochs[1] != epochs[2]);
  CHECK(resumed.at(16) == epochs[2][2]);
  CHECK(resumed.at(9) == epochs[1][2]);
  std::vector<int64_t> others;
  for (int64_t position = 0; position < 7; ++position) others.push_back(other.at(position));
  CHECK(others != epochs[0]);
  RowOrder of_twelve(12, 0, true);
  std::vector<int64_t> first;
  for (int64_t position = 0; position < 12; ++position) first.push_back(of_twelve.at(position));
  CHECK(first == std::vector<int64_t>{7, 4, 0, 11, 2, 1, 6, 8, 9, 3, 10, 5});  // that of Python's samples
}

TEST_CASE("rows: those that were moved from") {
  const TemporaryFolder folder;
  const TokenFile file(file_of(folder, {3, 12, 2}));
  for (const RowKind kind : {RowKind::kPacked, RowKind::kStream}) {
    Rows rows(file, all_of(file), 5, kind);
    const Rows others(std::move(rows));
    CHECK(others.row(0).size() == 2);
    CHECK_THROWS_WITH_AS(rows.row(0), doctest::Contains("[set of rows] this set of rows was moved from"),
                         std::invalid_argument);
  }
  RowOrder order(9, 1, true);
  const int64_t third = order.at(3);
  RowOrder other(std::move(order));
  CHECK(order.at(3) == third);
  CHECK(other.at(3) == third);
}

TEST_CASE("rows: mistakes") {
  const TemporaryFolder folder;
  const TokenFile file(file_of(folder, {3}));
  CHECK_THROWS_AS(Rows(file, {0}, 1, RowKind::kPacked), std::invalid_argument);
  CHECK(parse_row_kind("stream") == RowKind::kStream);
  CHECK_THROWS_AS(parse_row_kind("rows"), std::invalid_argument);
}

}  // namespace
}  // namespace roundpipe::tokens
