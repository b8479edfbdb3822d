#include <roundpipe/tokens/token_writer.h>

#include <fstream>
#include <iterator>
#include <optional>
#include <stdexcept>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/tokens/token_file.h>

#include "token_writer.h"

namespace roundpipe::tokens {
namespace {

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

bool is_empty(const TemporaryFolder& folder) { return std::filesystem::is_empty(folder.path()); }

TEST_CASE("token writer: the bytes of the format") {
  const TemporaryFolder folder;
  const std::string path = folder / "x.tokens";
  const auto write = [&](const std::vector<std::vector<int64_t>>& documents, int64_t vocabulary) {
    TokenWriter writer(path, vocabulary);
    for (const auto& document : documents) writer.append(document);
    CHECK(writer.documents() == static_cast<int64_t>(documents.size()));
    writer.finish();
    return bytes_of(path);
  };
  CHECK(write({{1, 2, 3}, {19}, {7, 7, 7}}, 20) == token_bytes<uint16_t>({{1, 2, 3}, {19}, {7, 7, 7}}, 20));
  CHECK(write({{65535}}, 65536) == token_bytes<uint16_t>({{65535}}, 65536));
  CHECK(write({{65536, 1}}, 65537) == token_bytes<uint32_t>({{65536, 1}}, 65537));
  CHECK(TokenFile(path).largest() == 65536);
  // More than is held at once.
  const std::vector<uint16_t> many(700'000, 3);
  CHECK(write({{many.begin(), many.end()}, {1}}, 4) == token_bytes<uint16_t>({many, {1}}, 4));
  CHECK(TokenFile(path).largest() == 3);
}

TEST_CASE("token writer: a document that is refused is not in the file") {
  const TemporaryFolder folder;
  TokenWriter writer(folder / "x.tokens", 20);
  for (const std::vector<int64_t>& bad : std::vector<std::vector<int64_t>>{{}, {20}, {1, -1}}) {
    CHECK_THROWS_AS(writer.append(bad), std::invalid_argument);
  }
  CHECK_THROWS_WITH_AS(writer.append({3, 25}), doctest::Contains("tokens from 3 to 25, expected 0 to 19"),
                       std::invalid_argument);
  writer.append({5});
  CHECK(writer.tokens() == 1);
  writer.finish();
  CHECK_THROWS_WITH_AS(writer.append({5}), doctest::Contains("the file is finished"), std::invalid_argument);
  CHECK(bytes_of(folder / "x.tokens") == token_bytes<uint16_t>({{5}}, 20));
}

TEST_CASE("token writer: one that is not finished leaves nothing") {
  const TemporaryFolder folder;
  const std::string path = folder / "x.tokens";
  {
    TokenWriter writer(path, 10);
    CHECK_THROWS_WITH_AS(writer.finish(), doctest::Contains("there are no documents"), std::invalid_argument);
  }
  CHECK(is_empty(folder));
  for (const int64_t vocabulary : {int64_t{0}, int64_t{1} << 31}) {
    CHECK_THROWS_WITH_AS(TokenWriter(path, vocabulary), doctest::Contains("vocabulary is"), std::invalid_argument);
  }
  CHECK_THROWS_AS(TokenWriter("/nowhere/x.tokens", 10), Error);
  CHECK(is_empty(folder));
  TokenWriter whole(path, 10);
  whole.append({1});
  whole.finish();
  {
    TokenWriter writer(path, 10);
    writer.append({2});
  }
  CHECK(bytes_of(path) == token_bytes<uint16_t>({{1}}, 10));  // what was there stays
}

}  // namespace
}  // namespace roundpipe::tokens
