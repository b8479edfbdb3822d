#include <roundpipe/tokens/shuffle.h>

#include <algorithm>
#include <bit>
#include <numeric>

#include <roundpipe/core/error.h>
#include <roundpipe/tokens/blake2b.h>

namespace roundpipe::tokens {

namespace {

constexpr int64_t kSmall = 1 << 10;  // up to here, a permutation is made at once, from images among far more numbers
constexpr int kSmallHalfBits = 16;

// SplitMix64's finalizer: every bit depends on all bits.
uint64_t mixed(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

}  // namespace

Shuffle::Shuffle(int64_t count, std::string_view key)
    : count_(count),
      half_bits_(count <= kSmall ? kSmallHalfBits : (std::bit_width(static_cast<uint64_t>(count - 1)) + 1) / 2),
      keys_(blake2b(key)) {
  if (count > kSmall) return;
  std::vector<uint64_t> images;
  for (int64_t i = 0; i < count; ++i) images.push_back(image_of(static_cast<uint64_t>(i)));
  whole_.resize(images.size());
  std::iota(whole_.begin(), whole_.end(), int64_t{0});
  std::ranges::sort(whole_, {}, [&](int64_t number) { return images[static_cast<size_t>(number)]; });
}

int64_t Shuffle::at(int64_t position) const {
  if (!whole_.empty()) return whole_[static_cast<size_t>(position)];
  uint64_t found = image_of(static_cast<uint64_t>(position));
  while (found >= static_cast<uint64_t>(count_)) found = image_of(found);
  return static_cast<int64_t>(found);
}

uint64_t Shuffle::image_of(uint64_t value) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = value >> half_bits_, right = value & mask;
  for (const uint64_t key : keys_) {
    const uint64_t next = left ^ (mixed(right ^ key) & mask);
    left = right;
    right = next;
  }
  return (left << half_bits_) | right;
}

// The keys are Python's tuples as text, as the package has always written them.
Shuffle epoch_order(int64_t count, std::string_view seed, int64_t epoch) {
  return {count, concat("(", seed, ", ", epoch, ")")};
}

Shuffle held_out_order(int64_t count, std::string_view seed) { return {count, concat("('held out', ", seed, ")")}; }

}  // namespace roundpipe::tokens
