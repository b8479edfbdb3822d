#include <roundpipe/storage/disk_tier.h>

#include <sys/wait.h>

#include <atomic>
#include <csignal>
#include <cstring>
#include <random>
#include <thread>

#include <doctest/doctest.h>

#include "faulty_files.h"

using namespace roundpipe::storage;
using roundpipe::files::Call;
using roundpipe::files::test::contains;
using roundpipe::files::test::error_of;
using roundpipe::files::test::FaultyFiles;
using roundpipe::support::TemporaryFolder;
using Use = DiskTier::Use;

namespace {

constexpr int64_t kBytes = 3 * 4096 + 100;

// Writes bytes that say which block and which turn they are of.
void change(DiskTier& tier, size_t block, int turn, int64_t bytes = kBytes) {
  const at::Tensor memory = tier.acquire(block, bytes, Use::kChange);
  auto* const data = static_cast<uint8_t*>(memory.mutable_data_ptr());
  for (int64_t i = 0; i < bytes; ++i) data[i] = static_cast<uint8_t>(i * 7 + static_cast<int64_t>(block) * 31 + turn);
  tier.release(block, Use::kChange);
}

bool has(DiskTier& tier, size_t block, int turn, int64_t bytes = kBytes) {
  const at::Tensor memory = tier.acquire(block, 0, Use::kRead);
  const auto* const data = static_cast<const uint8_t*>(memory.const_data_ptr());
  bool same = memory.numel() >= bytes;
  for (int64_t i = 0; same && i < bytes; ++i)
    same = data[i] == static_cast<uint8_t>(i * 7 + static_cast<int64_t>(block) * 31 + turn);
  tier.release(block, Use::kRead);
  return same;
}

std::vector<size_t> backwards(size_t count) {
  std::vector<size_t> order;
  for (size_t i = count; i-- > 0;) order.push_back(i);
  return order;
}

constexpr int64_t kWindow = 3 * 4 * 4096;

}  // namespace

TEST_CASE("disk tier: what was released is there again, through a window of a few blocks") {
  const TemporaryFolder folder;
  FaultyFiles files("disk");
  for (const int64_t most : {0, 4096, 1000}) {  // short transfers, also such as no disk makes
    CAPTURE(most);
    files.most_at_once = most;
    DiskTier tier(folder.path(), std::vector<int64_t>(8, kBytes), kWindow, files);
    for (int turn = 0; turn < 4; ++turn) {
      tier.expect(backwards(8));
      for (const size_t block : backwards(8)) {
        if (turn > 0) CHECK(has(tier, block, turn - 1));
        change(tier, block, turn);
        tier.over(block);
      }
    }
    for (size_t block = 0; block < 8; ++block) CHECK(has(tier, block, 3));
    tier.raise();
    CHECK(tier.stats().most_memory_bytes <= kWindow);
    CHECK(tier.stats().written_bytes > 0);
  }
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("disk tier: blocks that fit are not read again") {
  const TemporaryFolder folder;
  DiskTier tier(folder.path(), {kBytes, kBytes, kBytes}, kWindow);
  for (int turn = 0; turn < 3; ++turn) {
    tier.expect(backwards(3));
    for (const size_t block : backwards(3)) {
      change(tier, block, turn);
      tier.over(block);
    }
  }
  for (size_t block = 0; block < 3; ++block) CHECK(has(tier, block, 2));
  CHECK(tier.stats().read_bytes == 0);
}

TEST_CASE("disk tier: blocks grow, and keep what they had") {
  const TemporaryFolder folder;
  DiskTier tier(folder.path(), {kBytes, kBytes, kBytes, kBytes}, kWindow);
  for (size_t block = 0; block < 4; ++block) change(tier, block, 1);
  const at::Tensor grown = tier.acquire(1, 3 * kBytes, Use::kChange);
  CHECK(grown.numel() == 3 * kBytes);
  tier.release(1, Use::kChange);
  for (int round = 0; round < 2; ++round) {
    for (size_t block = 0; block < 4; ++block) CHECK(has(tier, block, 1));
  }
  CHECK(tier.acquire(1, 0, Use::kRead).numel() == 3 * kBytes);
  tier.release(1, Use::kRead);
}

TEST_CASE("disk tier: a block that comes into what is set aside for it takes no more memory than that") {
  const TemporaryFolder folder;
  DiskTier tier(folder.path(), {kBytes, kBytes}, 4 * 4096);
  for (const int64_t bytes : {int64_t{100}, kBytes}) {
    for (size_t block = 0; block < 2; ++block) change(tier, block, 1, bytes);
    for (size_t block = 0; block < 2; ++block) CHECK(has(tier, block, 1, bytes));
  }
  tier.raise();
  CHECK(tier.stats().most_memory_bytes == 4 * 4096);
}

TEST_CASE("disk tier: a write that fails keeps the block, is told, and is tried again") {
  const TemporaryFolder folder;
  FaultyFiles files("disk");
  std::atomic<bool> is_full{true};
  files.fault = [&](Call call, const std::string&, int) { return call == Call::kWrite && is_full ? ENOSPC : 0; };
  DiskTier tier(folder.path(), std::vector<int64_t>(8, kBytes), kWindow, files);
  for (size_t block = 0; block < 8; ++block) change(tier, block, 0);
  tier.settle();
  const std::string told = error_of<roundpipe::Error>([&] { tier.raise(); });
  CHECK(contains(told, "[disk] cannot write"));
  CHECK(contains(told, folder.path() + ": No space left on device; free some space there"));
  // Nothing has changed: it tells again.
  CHECK(contains(error_of<roundpipe::Error>([&] { tier.raise(); }), "No space left"));
  for (size_t block = 0; block < 8; ++block) CHECK(has(tier, block, 0));
  is_full = false;
  tier.raise();
  for (size_t block = 0; block < 8; ++block) CHECK(has(tier, block, 0));
  for (size_t block = 0; block < 8; ++block) change(tier, block, 1);
  for (size_t block = 0; block < 8; ++block) CHECK(has(tier, block, 1));
  tier.raise();
}

TEST_CASE("disk tier: a read that fails leaves the block as it is on the disk") {
  const TemporaryFolder folder;
  FaultyFiles files("disk");
  std::atomic<bool> is_broken{false};
  files.fault = [&](Call call, const std::string&, int) { return call == Call::kRead && is_broken ? EIO : 0; };
  DiskTier tier(folder.path(), std::vector<int64_t>(8, kBytes), kWindow, files);
  for (size_t block = 0; block < 8; ++block) change(tier, block, 0);
  is_broken = true;
  tier.expect(backwards(8));
  bool failed = false;
  for (size_t block = 0; block < 8; ++block) {
    bool same = true;
    const std::string told = error_of<Unreadable>([&] { same = has(tier, block, 0); });
    CHECK(same);
    failed |= contains(told, "[disk] cannot read") && contains(told, "the disk may be failing");
  }
  CHECK(failed);
  is_broken = false;
  for (size_t block = 0; block < 8; ++block) CHECK(has(tier, block, 0));
}

TEST_CASE("disk tier: a disk without room is refused at the start, and one without direct transfers is used") {
  const TemporaryFolder folder;
  FaultyFiles files("disk");
  files.fault = [&](Call call, const std::string&, int) { return call == Call::kReserve ? ENOSPC : 0; };
  CHECK(contains(error_of<roundpipe::Error>([&] { DiskTier(folder.path(), {kBytes}, kWindow, files); }),
                 "[disk] cannot set 16.00 KiB aside for the scratch file in " + folder.path()));
  files.fault = [&](Call call, const std::string&, int) { return call == Call::kOpen ? EACCES : 0; };
  CHECK(contains(error_of<roundpipe::Error>([&] { DiskTier(folder.path(), {kBytes}, kWindow, files); }),
                 "[disk] cannot make a scratch file in"));
  std::atomic<int> opened{0}, synced{0};
  files.fault = [&](Call call, const std::string&, int) {
    if (call == Call::kSync) ++synced;
    return call == Call::kOpen && ++opened == 2 ? EINVAL : 0;
  };
  DiskTier tier(folder.path(), std::vector<int64_t>(8, kBytes), kWindow, files);
  for (size_t block = 0; block < 8; ++block) change(tier, block, 0);
  for (size_t block = 0; block < 8; ++block) CHECK(has(tier, block, 0));
  CHECK(synced > 0);
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("disk tier: nothing is left of a process that was killed") {
  const TemporaryFolder folder;
  int ready[2];
  REQUIRE(::pipe(ready) == 0);
  const pid_t child = roundpipe::files::test::forked();
  if (child == 0) {
    DiskTier tier(folder.path(), std::vector<int64_t>(8, kBytes), kWindow);
    for (size_t block = 0; block < 8; ++block) change(tier, block, 0);
    const char done = 1;
    (void)!::write(ready[1], &done, 1);
    for (;;) ::pause();
  }
  char done = 0;
  REQUIRE(::read(ready[0], &done, 1) == 1);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  for (const int end : ready) ::close(end);
  CHECK(std::filesystem::is_empty(folder.path()));
}

TEST_CASE("disk tier: several threads at once, in any order") {
  const TemporaryFolder folder;
  constexpr size_t kBlocks = 10;
  DiskTier tier(folder.path(), std::vector<int64_t>(kBlocks, kBytes), kWindow);
  for (size_t block = 0; block < kBlocks; ++block) change(tier, block, 0);
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      for (int i = 0; i < 200; ++i) {
        const size_t block = random() % kBlocks;
        if (random() % 8 == 0) tier.expect(backwards(kBlocks));
        if (random() % 8 == 0) tier.over(block);
        if (random() % 2 == 0) {
          change(tier, block, 0);
        } else {
          wrong += has(tier, block, 0) ? 0 : 1;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == 0);
  CHECK(tier.stats().most_memory_bytes <= kWindow + 4 * 4 * 4096);
}
