#pragma once

#include <bit>
#include <cstdint>

namespace roundpipe::tokens {

static_assert(std::endian::native == std::endian::little, "token files are as they lie in memory");

// The first bytes of a token file, as they lie there; see docs/reference/token-files.md.
struct Header {
  static constexpr char kMagic[8] = {'R', 'P', 'T', 'O', 'K', 'E', 'N', 'S'};
  static constexpr uint32_t kVersion = 1;
  static constexpr int64_t kMostOfTwoBytes = 1 << 16;  // of the vocabulary
  static constexpr int64_t kMostVocabulary = 2147483647;

  char magic[8];
  uint32_t version;
  uint32_t token_bytes;
  uint64_t tokens;
  uint64_t documents;
  uint64_t vocabulary;
  uint32_t tokens_checksum;
  uint32_t ends_checksum;
  char zeros[12];
  uint32_t checksum;
};
static_assert(sizeof(Header) == 64);

}  // namespace roundpipe::tokens
