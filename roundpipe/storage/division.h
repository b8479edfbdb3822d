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

  int64_t total_memory_bytes() const { return memory_bytes + window_bytes; }
};

// How many of the largest blocks that come and go the window holds, so that one is read, one used and one written.
inline constexpr int64_t kWindowBlocks = 3;

// Divides blocks of these sizes so that as little as possible is read and written: as all are used once in each step,
// in the same order, those that stay are never read again, and whatever else is kept is used once by the next step at
// most. Those that stay are spread evenly over the order, so that the disk is never idle. `memory_bytes`: what all may
// take; 0: the least of full speed, kWindowBlocks. Throws std::invalid_argument if not even the largest block fits.
Division divide(const std::vector<int64_t>& block_bytes, int64_t memory_bytes);

}  // namespace roundpipe::storage
