#include <roundpipe/storage/division.h>

#include <stdexcept>

#include <doctest/doctest.h>

using roundpipe::storage::divide;
using roundpipe::storage::Division;

namespace {

// What is said of a division follows from the blocks.
void check_sums(const std::vector<int64_t>& blocks, const Division& division, int64_t memory_bytes) {
  int64_t here = 0, away = 0, largest = 0;
  for (size_t i = 0; i < blocks.size(); ++i) {
    (division.in_memory[i] ? here : away) += blocks[i];
    if (!division.in_memory[i]) largest = std::max(largest, blocks[i]);
  }
  CHECK(here == division.memory_bytes);
  CHECK(away == division.disk_bytes);
  CHECK(division.window_bytes >= largest);
  CHECK(division.memory_bytes + division.window_bytes <= memory_bytes);
}

}  // namespace

TEST_CASE("division: what fits as a whole stays, and nothing is on the disk") {
  const Division division = divide({10, 20, 30}, 60);
  check_sums({10, 20, 30}, division, 60);
  CHECK(division.disk_bytes == 0);
  CHECK(division.window_bytes == 0);
}

TEST_CASE("division: without a limit, a window through which every block passes") {
  const Division division = divide(std::vector<int64_t>(12, 10), 0);
  check_sums(std::vector<int64_t>(12, 10), division, 30);
  CHECK(division.window_bytes == 30);
  CHECK(division.disk_bytes == 120);
  CHECK(divide({10, 10}, 0).disk_bytes == 0);  // fewer than the window holds
}

TEST_CASE("division: the window holds a share of each part of what passes through it") {
  const Division division = divide(std::vector<int64_t>(12, 10), 0);
  CHECK(division.in_window(20, 20) == 20);
  CHECK(division.in_window(100, 120) == 25);
  CHECK(division.in_window(20, 120) == 5);
}

TEST_CASE("division: blocks that stay are spread over the order") {
  const Division division = divide(std::vector<int64_t>(12, 10), 90);
  check_sums(std::vector<int64_t>(12, 10), division, 90);
  CHECK(division.memory_bytes == 60);
  for (size_t i = 0; i < 12; i += 2) CHECK(division.in_memory[i] != division.in_memory[i + 1]);
}

TEST_CASE("division: a large block stays where that makes the window smaller") {
  std::vector<int64_t> blocks(12, 10);
  blocks.front() = 40;
  const Division division = divide(blocks, 100);
  check_sums(blocks, division, 100);
  CHECK(division.in_memory[0]);
  CHECK(division.window_bytes == 30);
  CHECK(division.memory_bytes == 70);
}

TEST_CASE("division: less than the window of full speed, and too little") {
  const std::vector<int64_t> blocks = {40, 10, 10, 10, 30};
  const Division division = divide(blocks, 50);
  check_sums(blocks, division, 50);
  CHECK_THROWS_WITH_AS(
      divide(blocks, 39),
      "[disk] the moments may take 39 B of host memory, expected at least 40 B, those of the largest layer; allow more",
      std::invalid_argument);
}
