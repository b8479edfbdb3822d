#include <roundpipe/files/crc32c.h>

#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace roundpipe::files;

namespace {

// Bit by bit, as the standard defines it.
uint32_t slow(const unsigned char* data, std::size_t bytes) {
  uint32_t crc = 0xFFFFFFFF;
  for (std::size_t i = 0; i < bytes; ++i) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? 0x82F63B78 : 0);
  }
  return ~crc;
}

std::vector<unsigned char> random_bytes(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<unsigned char> bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

}  // namespace

TEST_CASE("crc32c: the known values of RFC 3720") {
  const std::string digits = "123456789";
  CHECK(crc32c(digits.data(), digits.size()) == 0xE3069283);
  const std::vector<unsigned char> zeros(32, 0);
  CHECK(crc32c(zeros.data(), 32) == 0x8A9136AA);
  const std::vector<unsigned char> ones(32, 0xFF);
  CHECK(crc32c(ones.data(), 32) == 0x62A8AB43);
  CHECK(crc32c(nullptr, 0) == 0);
}

TEST_CASE("crc32c: instructions and tables agree with the definition, at every length and alignment") {
  const std::vector<unsigned char> bytes = random_bytes(200'000, 1);
  for (std::size_t length : {0, 1, 7, 8, 9, 63, 64, 1000, 49151, 49152, 49153, 98304, 150'001, 199'990}) {
    for (std::size_t start : {0, 1, 3, 8}) {
      const uint32_t expected = slow(bytes.data() + start, length);
      CHECK(crc32c(bytes.data() + start, length) == expected);
      CHECK(crc32c_by_tables(bytes.data() + start, length) == expected);
    }
  }
}

TEST_CASE("crc32c: pieces give the checksum of the whole, by seed and by combining") {
  const std::vector<unsigned char> bytes = random_bytes(120'000, 2);
  const uint32_t whole = crc32c(bytes.data(), bytes.size());
  for (std::size_t cut : {0, 1, 8, 4097, 60'000, 119'999, 120'000}) {
    const uint32_t first = crc32c(bytes.data(), cut);
    const uint32_t second = crc32c(bytes.data() + cut, bytes.size() - cut);
    CHECK(crc32c(bytes.data() + cut, bytes.size() - cut, first) == whole);
    CHECK(crc32c_by_tables(bytes.data() + cut, bytes.size() - cut, first) == whole);
    CHECK(crc32c_combine(first, second, bytes.size() - cut) == whole);
  }
}

TEST_CASE("crc32c: combining is associative for lengths beyond 32 bits") {
  const uint64_t b = (1ULL << 33) + 5;
  const uint64_t c = (1ULL << 40) + 12345;
  const uint32_t left = crc32c_combine(crc32c_combine(0x12345678, 0x9ABCDEF0, b), 0x0BADF00D, c);
  const uint32_t right = crc32c_combine(0x12345678, crc32c_combine(0x9ABCDEF0, 0x0BADF00D, c), b + c);
  CHECK(left == right);
}
