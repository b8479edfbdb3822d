#include <roundpipe/files/crc32c.h>

#include <array>
#include <bit>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace roundpipe::files {
namespace {

// Polynomials over two elements, bits reversed: the highest bit is the coefficient of x^0.
constexpr uint32_t kPolynomial = 0x82F63B78;
constexpr uint32_t kOne = 0x80000000;

constexpr uint32_t times_x(uint32_t a) { return (a >> 1) ^ (a & 1 ? kPolynomial : 0); }

constexpr uint32_t multiply(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a != 0; a <<= 1) {
    if (a & kOne) product ^= b;
    b = times_x(b);
  }
  return product;
}

// x^(2^n), n = 0..63
constexpr auto kSquares = [] {
  std::array<uint32_t, 64> table{};
  table[0] = times_x(kOne);
  for (std::size_t n = 1; n < table.size(); ++n) table[n] = multiply(table[n - 1], table[n - 1]);
  return table;
}();

// x^(8 * bytes): what a checksum is multiplied by when so many zero bytes follow.
constexpr uint32_t shift_by(uint64_t bytes) {
  uint32_t power = kOne;
  for (std::size_t n = 3; bytes != 0; bytes >>= 1, ++n) {
    if (bytes & 1) power = multiply(kSquares[n % 64], power);
  }
  return power;
}

// kTables[k][byte]: the checksum's change by a byte that k others follow.
constexpr auto kTables = [] {
  std::array<std::array<uint32_t, 256>, 8> tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = times_x(crc);
    tables[0][byte] = crc;
  }
  for (std::size_t k = 1; k < tables.size(); ++k) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 0xFF];
    }
  }
  return tables;
}();

uint64_t load_8(const unsigned char* at) noexcept {
  uint64_t word = 0;
  std::memcpy(&word, at, 8);
  return word;
}

uint32_t by_tables(const unsigned char* at, std::size_t bytes, uint32_t crc) noexcept {
  if constexpr (std::endian::native == std::endian::little) {
    for (; bytes >= 8; bytes -= 8, at += 8) {
      const uint64_t word = load_8(at) ^ crc;
      crc = 0;
      for (std::size_t k = 0; k < 8; ++k) crc ^= kTables[7 - k][(word >> (8 * k)) & 0xFF];
    }
  }
  for (; bytes != 0; --bytes, ++at) crc = (crc >> 8) ^ kTables[0][(crc ^ *at) & 0xFF];
  return crc;
}

#if defined(__x86_64__)
#define ROUNDPIPE_HAS_CRC_INSTRUCTIONS __attribute__((target("sse4.2")))
bool has_instructions() noexcept { return __builtin_cpu_supports("sse4.2"); }
ROUNDPIPE_HAS_CRC_INSTRUCTIONS inline uint32_t step_8(uint32_t crc, uint64_t word) noexcept {
  return static_cast<uint32_t>(_mm_crc32_u64(crc, word));
}
ROUNDPIPE_HAS_CRC_INSTRUCTIONS inline uint32_t step_1(uint32_t crc, unsigned char byte) noexcept {
  return _mm_crc32_u8(crc, byte);
}
#elif defined(__aarch64__) && defined(__linux__)
#define ROUNDPIPE_HAS_CRC_INSTRUCTIONS __attribute__((target("+crc")))
bool has_instructions() noexcept { return (getauxval(AT_HWCAP) & (1UL << 7)) != 0; }  // HWCAP_CRC32
ROUNDPIPE_HAS_CRC_INSTRUCTIONS inline uint32_t step_8(uint32_t crc, uint64_t word) noexcept {
  return __crc32cd(crc, word);
}
ROUNDPIPE_HAS_CRC_INSTRUCTIONS inline uint32_t step_1(uint32_t crc, unsigned char byte) noexcept {
  return __crc32cb(crc, byte);
}
#endif

#if defined(ROUNDPIPE_HAS_CRC_INSTRUCTIONS)
// An instruction's result is late by three cycles and one starts in each, so three stretches are summed at a time.
constexpr std::size_t kStretch = 16 * 1024;

ROUNDPIPE_HAS_CRC_INSTRUCTIONS uint32_t by_instructions(const unsigned char* at, std::size_t bytes,
                                                        uint32_t crc) noexcept {
  constexpr uint32_t kShift = shift_by(kStretch);
  for (; bytes >= 3 * kStretch; bytes -= 3 * kStretch, at += 3 * kStretch) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (std::size_t i = 0; i < kStretch; i += 8) {
      crc = step_8(crc, load_8(at + i));
      second = step_8(second, load_8(at + kStretch + i));
      third = step_8(third, load_8(at + 2 * kStretch + i));
    }
    crc = multiply(kShift, multiply(kShift, crc) ^ second) ^ third;
  }
  for (; bytes >= 8; bytes -= 8, at += 8) crc = step_8(crc, load_8(at));
  for (; bytes != 0; --bytes, ++at) crc = step_1(crc, *at);
  return crc;
}
#endif

}  // namespace

uint32_t crc32c(const void* data, std::size_t bytes, uint32_t seed) noexcept {
#if defined(ROUNDPIPE_HAS_CRC_INSTRUCTIONS)
  static const bool use_instructions = has_instructions();
  if (use_instructions) return ~by_instructions(static_cast<const unsigned char*>(data), bytes, ~seed);
#endif
  return crc32c_by_tables(data, bytes, seed);
}

uint32_t crc32c_by_tables(const void* data, std::size_t bytes, uint32_t seed) noexcept {
  return ~by_tables(static_cast<const unsigned char*>(data), bytes, ~seed);
}

uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_bytes) noexcept {
  return multiply(shift_by(second_bytes), first) ^ second;
}

}  // namespace roundpipe::files
