#pragma once

#include <cstdint>
#include <vector>

namespace roundpipe::storage {

// Which blocks stay in memory, and how much of it the others pass through.
struct Division {
  std::vector<bool> in_memory;  // of each block
  int64_t memory_bytes = 0;     // of the blocks that stay
  int64_t window_bytes = 0;     // for those that come and go
  int64_t disk_bytes = 0;       // of those; as many are read and written in each step

  // How much of `part_bytes` is in the window, if they are among `all_bytes` that come and go.
  int64_t in_window(int64_t part_bytes, int64_t all_bytes) const;
};

// How many of the largest blocks that come and go the window holds, so that one is read, one used and one written.
inline constexpr int64_t kWindowBlocks = 3;

// Divides blocks of these sizes so that as little as possible is read and written: as all are used once in each step,
// in the same order, those that stay are never read again, and whatever else is kept is used once by the next step at
// most. Those that stay are spread evenly over the order, so that the disk is never idle. `memory_bytes`: what all may
// take; 0: the least of full speed, kWindowBlocks. Throws std::invalid_argument if not even the largest block fits;
// `held`: what blocks hold, in its words.
Division divide(const std::vector<int64_t>& block_bytes, int64_t memory_bytes, const char* held = "moments");

}  // namespace roundpipe::storage
