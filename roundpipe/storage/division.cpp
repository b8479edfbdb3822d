#include <roundpipe/storage/division.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>

namespace roundpipe::storage {

namespace {

int64_t largest(const std::vector<int64_t>& bytes, const std::vector<bool>& left_out) {
  int64_t most = 0;
  for (size_t i = 0; i < bytes.size(); ++i) {
    if (!left_out[i]) most = std::max(most, bytes[i]);
  }
  return most;
}

// Lets more blocks stay, as long as `room_bytes` allow.
void fill(const std::vector<int64_t>& bytes, int64_t room_bytes, Division& division) {
  int64_t others = 0;
  for (size_t i = 0; i < bytes.size(); ++i) others += division.in_memory[i] ? 0 : bytes[i];
  const double part = others > 0 ? static_cast<double>(room_bytes) / static_cast<double>(others) : 0;
  // Evenly first, then wherever something fits.
  for (const bool evenly : {true, false}) {
    double passed = 0;
    int64_t taken = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      if (division.in_memory[i]) continue;
      passed += part * static_cast<double>(bytes[i]);
      const bool is_due = !evenly || static_cast<double>(taken + bytes[i]) <= passed;
      if (!is_due || bytes[i] > room_bytes) continue;
      division.in_memory[i] = true;
      division.memory_bytes += bytes[i];
      taken += bytes[i];
      room_bytes -= bytes[i];
    }
  }
}

}  // namespace

int64_t Division::in_window(int64_t part_bytes, int64_t all_bytes) const {
  if (all_bytes <= window_bytes) return part_bytes;
  return static_cast<int64_t>(static_cast<double>(part_bytes) / static_cast<double>(all_bytes) *
                              static_cast<double>(window_bytes));
}

Division divide(const std::vector<int64_t>& block_bytes, int64_t memory_bytes, const char* held) {
  const std::vector<bool> none(block_bytes.size(), false);
  const int64_t total = std::accumulate(block_bytes.begin(), block_bytes.end(), int64_t{0});
  const int64_t one = largest(block_bytes, none);
  if (memory_bytes == 0) memory_bytes = std::min(total, kWindowBlocks * one);
  if (memory_bytes < one) {
    throw std::invalid_argument(concat("[disk] the ", held, " may take ", format_bytes(memory_bytes),
                                       " of host memory, expected at least ", format_bytes(one),
                                       ", those of the largest layer; allow more"));
  }
  Division best{none, 0, memory_bytes, total};
  if (total <= memory_bytes) return {std::vector<bool>(block_bytes.size(), true), total, 0, 0};
  // A large block that stays makes the window smaller.
  std::vector<size_t> by_size(block_bytes.size());
  std::iota(by_size.begin(), by_size.end(), size_t{0});
  std::ranges::stable_sort(by_size, [&](size_t a, size_t b) { return block_bytes[a] > block_bytes[b]; });
  Division next{none, 0, 0, 0};
  for (const size_t block : by_size) {
    Division division = next;
    division.window_bytes = kWindowBlocks * largest(block_bytes, division.in_memory);
    const int64_t room_bytes = memory_bytes - division.memory_bytes - division.window_bytes;
    if (room_bytes >= 0) {
      fill(block_bytes, room_bytes, division);
      division.disk_bytes = total - division.memory_bytes;
      if (division.disk_bytes < best.disk_bytes) best = division;
    }
    next.in_memory[block] = true;
    next.memory_bytes += block_bytes[block];
  }
  return best;
}

}  // namespace roundpipe::storage
