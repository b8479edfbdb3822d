#include <roundpipe/tokens/token_file.h>

#include <functional>
#include <stdexcept>
#include <utility>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/tokens/rows.h>

#include "token_writer.h"

namespace roundpipe::tokens {
namespace {

const std::vector<std::vector<uint16_t>> kShort = {{5, 7, 11}, {13}, {17, 19}};

// What opening and verifying a file of these bytes says; empty: nothing is wrong.
std::string said_of(const TemporaryFolder& folder, const std::string& bytes) {
  try {
    TokenFile(write_bytes(folder / "some.tokens", bytes)).verify();
  } catch (const std::invalid_argument& error) {
    return concat("mistake: ", error.what());
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

void check_holds(const std::string& said, const std::string& text) {
  INFO(said);
  CHECK(said.find(text) != std::string::npos);
}

TEST_CASE("token file: tokens of 2 and of 4 bytes, and where documents lie") {
  const TemporaryFolder folder;
  const auto check = [&](const std::string& bytes, int64_t scale) {
    const TokenFile file(write_bytes(folder / "three.tokens", bytes));
    CHECK(file.tokens() == 6);
    CHECK(file.documents() == 3);
    CHECK(file.vocabulary() == 20 * scale);
    CHECK(file.begin(0) == 0);
    CHECK(file.begin(2) == 4);
    CHECK(file.end(2) == 6);
    std::vector<int64_t> tokens(4);
    file.read(1, 4, tokens.data());
    CHECK(tokens == std::vector<int64_t>{7 * scale, 11 * scale, 13 * scale, 17 * scale});
    int64_t bytes_seen = 0;
    file.verify([&](int64_t part) { bytes_seen += part; });
    CHECK(bytes_seen == (scale == 1 ? 12 : 24));
  };
  check(token_bytes<uint16_t>(kShort, 20), 1);
  std::vector<std::vector<uint32_t>> wide;
  for (const auto& document : kShort) {
    wide.emplace_back();
    for (const uint16_t token : document) wide.back().push_back(100'000u * token);
  }
  check(token_bytes<uint32_t>(wide, 2'000'000), 100'000);
}

TEST_CASE("token file: one that was moved from") {
  const TemporaryFolder folder;
  TokenFile file(write_bytes(folder / "some.tokens", token_bytes<uint16_t>(kShort, 20)));
  const TokenFile owner(std::move(file));
  int64_t token = 0;
  const std::function<void()> uses[] = {
      [&] { (void)file.tokens(); },
      [&] { (void)file.documents(); },
      [&] { (void)file.begin(1); },
      [&] { (void)file.end(0); },
      [&] { file.read(0, 1, &token); },
      [&] { file.verify(); },
      [&] { Rows(file, {0}, 2, RowKind::kStream); },
  };
  for (const auto& use : uses) {
    CHECK_THROWS_WITH_AS(use(), doctest::Contains("[token file] this token file was moved from"),
                         std::invalid_argument);
  }
  owner.read(5, 1, &token);
  CHECK(token == 19);
}

TEST_CASE("token file: every byte is checked, and every cut") {
  const TemporaryFolder folder;
  const std::string bytes = token_bytes<uint16_t>(kShort, 20);
  REQUIRE(said_of(folder, bytes).empty());
  const size_t padding = 64 + 12;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (i >= padding && i < padding + 4) continue;  // zeros that nobody reads
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ 1);
    CAPTURE(i);
    CHECK_FALSE(said_of(folder, damaged).empty());
  }
  for (size_t size = 0; size < bytes.size(); ++size) {
    CAPTURE(size);
    CHECK_FALSE(said_of(folder, bytes.substr(0, size)).empty());
  }
  check_holds(said_of(folder, bytes.substr(0, bytes.size() - 1)), "it was cut, or not written to its end");
  check_holds(said_of(folder, bytes + "x"), "it has 105 bytes, expected 104");
  check_holds(said_of(folder, std::string(200, '\0')), "mistake: [tokens]");
  CHECK_THROWS_WITH_AS(TokenFile("/nowhere"), doctest::Contains("there is no /nowhere"), std::invalid_argument);
  check_holds(said_of(folder, std::string(200, '\0')), "is no token file");
}

TEST_CASE("token file: another version, and numbers that no writer makes") {
  const TemporaryFolder folder;
  const auto with = [&](size_t offset, const std::string& field) {
    std::string bytes = token_bytes<uint16_t>(kShort, 20);
    bytes.replace(offset, field.size(), field);
    const uint32_t checksum = files::crc32c(bytes.data(), 60);
    std::memcpy(bytes.data() + 60, &checksum, sizeof(checksum));
    return said_of(folder, bytes);
  };
  const auto number = [](auto value) {
    std::string bytes;
    append(bytes, value);
    return bytes;
  };
  check_holds(with(8, number(uint32_t{2})), "has version 2, expected 1");
  for (const auto& [offset, field] : std::vector<std::pair<size_t, std::string>>{{12, number(uint32_t{3})},
                                                                                 {16, number(uint64_t{0})},
                                                                                 {16, number(~uint64_t{0})},
                                                                                 {24, number(uint64_t{0})},
                                                                                 {24, number(uint64_t{7})},
                                                                                 {32, number(uint64_t{0})},
                                                                                 {32, number(uint64_t{65537})}}) {
    check_holds(with(offset, field), "numbers that do not fit each other");
  }
}

TEST_CASE("token file: a token beyond the vocabulary is found when it is read") {
  const TemporaryFolder folder;
  const TokenFile file(write_bytes(folder / "some.tokens", token_bytes<uint16_t>(kShort, 19)));
  std::vector<int64_t> tokens(6);
  file.read(0, 5, tokens.data());
  CHECK_THROWS_WITH_AS(file.read(3, 3, tokens.data()), doctest::Contains("token 5 is 19, expected less than 19"),
                       Error);
}

}  // namespace
}  // namespace roundpipe::tokens
