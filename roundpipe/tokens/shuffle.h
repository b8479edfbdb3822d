#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

namespace roundpipe::tokens {

// A permutation of the numbers from 0 to below `count`, of which any part can be asked for: nothing is drawn, and a run
// that resumes needs its position only. The same count and key give the same one on every machine, and in every
// version, since runs that go on rely on it. Up to 8 KiB of memory. Any thread.
//
// It is a Feistel network over the next power of four; what falls outside of the count is sent through again. Small
// counts are sorted by their images instead, since few bits shuffle badly.
class Shuffle {
 public:
  // `key` chooses the permutation.
  Shuffle(int64_t count, std::string_view key);

  int64_t count() const { return count_; }
  // The number at a position. REQUIRES: 0 <= position < count().
  int64_t at(int64_t position) const;

 private:
  uint64_t image_of(uint64_t value) const;

  int64_t count_;
  int half_bits_;
  std::array<uint64_t, 6> keys_;
  std::vector<int64_t> whole_;  // of a small count
};

// The order of an epoch's rows. `seed`: a number as text.
Shuffle epoch_order(int64_t count, std::string_view seed, int64_t epoch);
// The order of records or documents of which the first are held out.
Shuffle held_out_order(int64_t count, std::string_view seed);

}  // namespace roundpipe::tokens
