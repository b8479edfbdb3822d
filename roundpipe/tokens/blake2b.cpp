#include <roundpipe/tokens/blake2b.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace roundpipe::tokens {

static_assert(std::endian::native == std::endian::little, "words are read as they lie in memory");

namespace {

constexpr size_t kBlockBytes = 128;
constexpr uint64_t kDigestBytes = 48;
constexpr std::array<uint64_t, 8> kStart = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                            0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                            0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};
constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};
constexpr uint8_t kMixed[8][4] = {{0, 4, 8, 12},  {1, 5, 9, 13},  {2, 6, 10, 14}, {3, 7, 11, 15},
                                  {0, 5, 10, 15}, {1, 6, 11, 12}, {2, 7, 8, 13},  {3, 4, 9, 14}};

void compress(std::array<uint64_t, 8>& state, const std::array<uint64_t, 16>& words, uint64_t bytes, bool is_last) {
  std::array<uint64_t, 16> v;
  std::ranges::copy(state, v.begin());
  std::ranges::copy(kStart, v.begin() + 8);
  v[12] ^= bytes;
  if (is_last) v[14] = ~v[14];
  for (int round = 0; round < 12; ++round) {
    const uint8_t* next = kOrder[round % 10];
    for (const auto& [a, b, c, d] : kMixed) {
      v[a] += v[b] + words[*next++];
      v[d] = std::rotr(v[d] ^ v[a], 32);
      v[c] += v[d];
      v[b] = std::rotr(v[b] ^ v[c], 24);
      v[a] += v[b] + words[*next++];
      v[d] = std::rotr(v[d] ^ v[a], 16);
      v[c] += v[d];
      v[b] = std::rotr(v[b] ^ v[c], 63);
    }
  }
  for (size_t i = 0; i < state.size(); ++i) state[i] ^= v[i] ^ v[i + 8];
}

}  // namespace

std::array<uint64_t, 6> blake2b(std::string_view text) {
  std::array<uint64_t, 8> state = kStart;
  state[0] ^= 0x01010000 ^ kDigestBytes;
  for (size_t at = 0;; at += kBlockBytes) {
    const size_t bytes = std::min(kBlockBytes, text.size() - at);
    const bool is_last = at + bytes == text.size();
    std::array<uint64_t, 16> words{};
    std::memcpy(words.data(), text.data() + at, bytes);
    compress(state, words, at + bytes, is_last);
    if (is_last) break;
  }
  std::array<uint64_t, 6> digest;
  std::copy_n(state.begin(), digest.size(), digest.begin());
  return digest;
}

}  // namespace roundpipe::tokens
