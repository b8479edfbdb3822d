#include <roundpipe/core/fingerprint.h>

#include <array>
#include <bit>
#include <cstring>

namespace roundpipe {

namespace {

// Independent lanes, so that the processor does not wait for one multiplication before it begins the next.
constexpr std::size_t kLanes = 8;
constexpr std::size_t kBlock_bytes = kLanes * sizeof(uint64_t);

// Odd, so that multiplying by them loses nothing. The steps are those of XXH64: different words, as different states,
// have different results, and the second multiplication spreads what the first one left in the highest bits.
constexpr uint64_t kWord = 0xC2B2AE3D27D4EB4F;
constexpr uint64_t kState = 0x9E3779B185EBCA87;
constexpr uint64_t kLast = 0x165667B19E3779F9;

uint64_t step(uint64_t state, uint64_t word) { return std::rotl(state + word * kWord, 31) * kState; }

using Lanes = std::array<uint64_t, kLanes>;

void add_block(Lanes& lanes, const unsigned char* block) {
  Lanes words;
  std::memcpy(words.data(), block, kBlock_bytes);
  for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = step(lanes[i], words[i]);
}

}  // namespace

uint64_t join_fingerprints(uint64_t first, uint64_t next) noexcept {
  uint64_t joined = std::rotl(first ^ step(0, next), 27) * kState + kLast;
  joined = (joined ^ (joined >> 33)) * kWord;
  return joined ^ (joined >> 29);
}

uint64_t fingerprint(const void* data, std::size_t bytes) noexcept {
  Lanes lanes;
  for (std::size_t i = 0; i < kLanes; ++i) lanes[i] = kLast * (i + 1);
  const auto* at = static_cast<const unsigned char*>(data);
  std::size_t left = bytes;
  for (; left >= kBlock_bytes; left -= kBlock_bytes, at += kBlock_bytes) add_block(lanes, at);
  if (left > 0) {
    std::array<unsigned char, kBlock_bytes> last{};
    std::memcpy(last.data(), at, left);
    add_block(lanes, last.data());
  }
  uint64_t joined = bytes;
  for (const uint64_t lane : lanes) joined = join_fingerprints(joined, lane);
  return joined;
}

}  // namespace roundpipe
