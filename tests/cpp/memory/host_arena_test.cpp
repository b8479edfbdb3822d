#include <roundpipe/memory/host_arena.h>

#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <bit>
#include <cstdlib>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/core/bytes.h>

using namespace roundpipe::memory;

namespace {

constexpr int64_t kKiB = 1024;
constexpr int64_t kMiB = 1024 * kKiB;

// The system's own locks, which count in VmLck. Called directly: sanitizers make the library's functions do nothing.
class SystemLocker final : public roundpipe::device::PageLocker {
 public:
  bool lock(void* data, int64_t size_bytes) override { return syscall(SYS_mlock, data, size_bytes) == 0; }
  void unlock(void* data, int64_t size_bytes) noexcept override { syscall(SYS_munlock, data, size_bytes); }
};

int64_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    int64_t kilobytes = 0;
    if (word == key + ":" && status >> kilobytes) return kilobytes * kKiB;
  }
  return -1;
}

bool may_lock(int64_t size_bytes) {
  rlimit limit{};
  getrlimit(RLIMIT_MEMLOCK, &limit);
  return limit.rlim_cur == RLIM_INFINITY || static_cast<int64_t>(limit.rlim_cur) >= size_bytes;
}

// torch's page-locking allocators without an accelerator: sizes are rounded up to powers of two.
class PowerOfTwoAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t size_bytes) override {
    if (fail) TORCH_CHECK(false, "no more page-locked memory");
    held_bytes += std::bit_ceil(size_bytes);
    all_powers &= std::has_single_bit(size_bytes);
    void* const data = std::aligned_alloc(4096, std::bit_ceil(size_bytes));
    return {data, data, &std::free, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* dest, const void* src, size_t count) const override { default_copy_data(dest, src, count); }
  bool record_event(void*, void*, c10::Stream) override { return false; }
  void empty_cache() override { ++emptied; }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

  bool fail = false;
  bool all_powers = true;
  int emptied = 0;
  size_t held_bytes = 0;
};

double waste(const HostArenaStats& stats) {
  return 1.0 - static_cast<double>(stats.asked_bytes) / static_cast<double>(stats.reserved_bytes);
}

void check_empty(const HostArenaStats& stats) {
  CHECK(stats.asked_bytes == 0);
  CHECK(stats.reserved_bytes == 0);
  CHECK(stats.locked_bytes == 0);
  CHECK(stats.pieces == 0);
}

}  // namespace

TEST_CASE("host arena: locks pages, and unlocks them when the last tensor in them is gone") {
  if (!may_lock(3 * kMiB)) {
    MESSAGE("RLIMIT_MEMLOCK is too small; raise it with ulimit -l");
    return;
  }
  SystemLocker locker;
  HostArena arena(make_mapped_source(&locker));
  const int64_t before = status_bytes("VmLck");
  at::Tensor large = arena.allocate(kMiB + 1);
  std::vector<at::Tensor> small;
  for (int i = 0; i < 10; ++i) small.push_back(arena.allocate(1000));
  CHECK(arena.stats().locked_bytes == arena.stats().reserved_bytes);
  CHECK(status_bytes("VmLck") - before == arena.stats().locked_bytes);
  CHECK(arena.stats().asked_bytes == kMiB + 1 + 10 * 1000);
  CHECK(arena.stats().pieces == 11);
  large.fill_(7);
  at::Tensor view = large.narrow(0, kMiB, 1);
  large.reset();
  CHECK(status_bytes("VmLck") - before == arena.stats().locked_bytes);
  CHECK(view.item<int>() == 7);
  view.reset();
  CHECK(arena.stats().asked_bytes == 10 * 1000);
  CHECK(status_bytes("VmLck") - before == arena.stats().locked_bytes);
  small.resize(1);
  CHECK(arena.stats().locked_bytes > 0);
  small.clear();
  check_empty(arena.stats());
  CHECK(status_bytes("VmLck") == before);
}

TEST_CASE("host arena: where the system refuses, memory is pageable, and the process hears of it once") {
  class Counting final : public c10::WarningHandler {
   public:
    void process(const c10::Warning& warning) override {
      if (warning.msg().find("[memory] could not page-lock") != std::string::npos) ++warnings;
    }
    int warnings = 0;
  } handler;
  c10::WarningUtils::WarningHandlerGuard guard(&handler);
  class Refusing final : public roundpipe::device::PageLocker {
   public:
    bool lock(void*, int64_t) override { return false; }
    void unlock(void*, int64_t) noexcept override { FAIL_CHECK("nothing was locked"); }
  } locker;
  HostArena arena(make_mapped_source(&locker));
  PowerOfTwoAllocator failing;
  failing.fail = true;
  HostArena other(make_pinned_source(&failing));
  HostArena third(make_unlockable_source());
  for (HostArena* each : {&arena, &other, &third}) {
    for (const int64_t size : {int64_t{100}, kMiB, 3 * kMiB}) {
      const at::Tensor piece = each->allocate(size).fill_(1);
      CHECK(piece.sum().item<int64_t>() == size);
      CHECK(each->stats().locked_bytes == 0);
    }
    check_empty(each->stats());
  }
  CHECK(handler.warnings == 1);
}

TEST_CASE("host arena: little is reserved beyond what was asked for, measured") {
  struct Case {
    const char* name;
    std::vector<int64_t> sizes;
  };
  std::mt19937 random(1);
  std::vector<Case> cases;
  cases.push_back({"28 layers of 100 MB", std::vector<int64_t>(28, 100'000'000)});
  cases.push_back({"500 layers of 300 KB", std::vector<int64_t>(500, 300'000)});
  cases.push_back({"2000 blocks of 70 KB", std::vector<int64_t>(2000, 70'000)});
  cases.push_back({"5000 blocks of 12 KB", std::vector<int64_t>(5000, 12'000)});
  cases.push_back({"40000 blocks of 256 bytes", std::vector<int64_t>(40'000, 256)});
  Case mixed{"3000 blocks of 256 bytes to 1 MB", {}};
  for (int i = 0; i < 3000; ++i) {
    const double size = std::exp(std::uniform_real_distribution(std::log(256.0), std::log(1e6))(random));
    mixed.sizes.push_back(roundpipe::align_up(static_cast<int64_t>(size), 256));
  }
  cases.push_back(std::move(mixed));
  for (const Case& each : cases) {
    HostArena arena(make_mapped_source(nullptr));
    std::vector<at::Tensor> pieces;
    for (const int64_t size : each.sizes) pieces.push_back(arena.allocate(size));
    const HostArenaStats stats = arena.stats();
    MESSAGE(std::string(each.name) << ": asked " << stats.asked_bytes << ", reserved " << stats.reserved_bytes
                                   << ", waste " << 100 * waste(stats) << " %");
    CHECK(waste(stats) < 0.03);
    pieces.clear();
    check_empty(arena.stats());
  }
}

TEST_CASE("host arena: pieces are apart, aligned, and freed neighbours become one range again") {
  HostArena arena(make_mapped_source(nullptr));
  std::mt19937 random(3);
  struct Piece {
    at::Tensor tensor;
    uint8_t mark;
  };
  std::vector<Piece> pieces;
  for (int round = 0; round < 4000; ++round) {
    if (!pieces.empty() && random() % 5 < 2) {
      std::swap(pieces[random() % pieces.size()], pieces.back());
      const Piece& last = pieces.back();
      CHECK((last.tensor == last.mark).all().item<bool>());
      pieces.pop_back();
    } else {
      const auto size = static_cast<int64_t>(random() % 9000 + 1);
      const auto mark = static_cast<uint8_t>(random());
      pieces.push_back({arena.allocate(size).fill_(mark), mark});
      CHECK(pieces.back().tensor.numel() == size);
      CHECK(reinterpret_cast<uintptr_t>(pieces.back().tensor.const_data_ptr()) % HostArena::kAlignment_bytes == 0);
    }
  }
  int64_t asked_bytes = 0;
  for (const Piece& piece : pieces) {
    CHECK((piece.tensor == piece.mark).all().item<bool>());
    asked_bytes += piece.tensor.numel();
  }
  CHECK(arena.stats().asked_bytes == asked_bytes);
  // All but one piece of each size class are freed: their memory has merged, so that larger pieces fit.
  const at::Tensor kept = pieces.front().tensor;
  pieces.clear();
  const int64_t reserved_bytes = arena.stats().reserved_bytes;
  CHECK(reserved_bytes < 600 * kKiB);
  const at::Tensor large = arena.allocate(120 * kKiB);
  CHECK(arena.stats().reserved_bytes == reserved_bytes);
}

TEST_CASE("host arena: no bytes are no piece") {
  HostArena arena(make_mapped_source(nullptr));
  const at::Tensor empty = arena.allocate(0);
  CHECK(empty.numel() == 0);
  CHECK(arena.stats().pieces == 0);
}

TEST_CASE("host arena: the system's refusal is said in words") {
  HostArena arena(make_mapped_source(nullptr));
  CHECK_THROWS_WITH_AS(arena.allocate(int64_t{1} << 60), doctest::Contains("[memory] the system has no 1048576.00 TiB"),
                       OutOfHostMemory);
  check_empty(arena.stats());
}

TEST_CASE("host arena: many threads take and give back") {
  HostArena arena(make_mapped_source(nullptr));
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&arena, t] {
      std::mt19937 random(static_cast<unsigned>(t));
      std::vector<at::Tensor> pieces(8);
      for (int i = 0; i < 400; ++i) {
        at::Tensor& piece = pieces[random() % pieces.size()];
        const auto size = static_cast<int64_t>(random() % (i % 10 == 0 ? 600'000 : 20'000) + 1);
        piece = arena.allocate(size);
        auto* const bytes = piece.mutable_data_ptr<uint8_t>();
        bytes[0] = bytes[size - 1] = static_cast<uint8_t>(t);
        std::this_thread::yield();
        CHECK(bytes[0] == t);
        CHECK(bytes[size - 1] == t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  check_empty(arena.stats());
}

TEST_CASE("host arena: torch's page-locking allocator is asked for powers of two, which are then packed") {
  PowerOfTwoAllocator allocator;
  HostArena arena(make_pinned_source(&allocator));
  // 130 of 256 bytes, if each had memory of its own: 49 % waste.
  const int64_t layer_bytes = 130 * kKiB * 4;
  std::vector<at::Tensor> pieces;
  for (int i = 0; i < 200; ++i) pieces.push_back(arena.allocate(layer_bytes));
  const HostArenaStats stats = arena.stats();
  CHECK(allocator.all_powers);
  CHECK(static_cast<int64_t>(allocator.held_bytes) == stats.reserved_bytes);
  CHECK(stats.locked_bytes == stats.reserved_bytes);
  MESSAGE("waste " << 100 * waste(stats) << " %");
  CHECK(waste(stats) < 0.12);
  // The leftover memory takes smaller pieces.
  for (int i = 0; i < 20; ++i) pieces.push_back(arena.allocate(100 * kKiB));
  CHECK(arena.stats().reserved_bytes == stats.reserved_bytes);
  CHECK(allocator.emptied == 0);
  pieces.clear();
  CHECK(allocator.emptied > 0);
  check_empty(arena.stats());
}

TEST_CASE("host arena: a forked child may drop and take memory while the parent's threads are busy") {
  HostArena& arena = HostArena::pageable();
  at::Tensor ours = arena.allocate(5000).fill_(3);
  std::atomic<bool> stop{false};
  std::thread busy([&] {
    while (!stop) arena.allocate(1000);
  });
  for (int i = 0; i < 20; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      ours.reset();
      const at::Tensor own = arena.allocate(2000);
      _exit(own.defined() ? 0 : 1);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
  }
  stop = true;
  busy.join();
  CHECK(ours[4999].item<int>() == 3);
}

TEST_CASE("host arena: what steps make and drop takes nothing new from the system once it has been there") {
  HostArena arena(make_mapped_source(nullptr), HostArena::Empty::kKept);
  const std::vector<int64_t> sizes = {3 * kMiB, 70 * kKiB, 1000, 5 * kMiB, 64, 400 * kKiB, 3 * kMiB};
  const auto step = [&] {
    std::vector<at::Tensor> pieces;
    for (const int64_t size : sizes) pieces.push_back(arena.allocate(size).fill_(1));
  };
  step();
  const int64_t reserved_bytes = arena.stats().reserved_bytes;
  CHECK(reserved_bytes > 0);
  CHECK(arena.stats().asked_bytes == 0);
  for (int i = 0; i < 5; ++i) {
    step();
    CHECK(arena.stats().reserved_bytes == reserved_bytes);
  }
  arena.trim();
  check_empty(arena.stats());
}

TEST_CASE("host arena: kept memory is at most half as much again as was in use at once, whatever sizes come") {
  HostArena arena(make_mapped_source(nullptr), HostArena::Empty::kKept);
  std::mt19937 random(0);
  int64_t most_bytes = 0;
  for (int round = 0; round < 200; ++round) {
    std::vector<at::Tensor> pieces;
    int64_t used_bytes = 0;
    for (int i = 0; i < 8; ++i) {
      const auto size = static_cast<int64_t>((256 * kKiB) << (random() % 5)) + static_cast<int64_t>(random() % 100'000);
      pieces.push_back(arena.allocate(size));
      used_bytes += size;
      most_bytes = std::max(most_bytes, used_bytes);
      // All pieces in use lie in segments that may be larger than they are.
      CHECK(arena.stats().reserved_bytes <= most_bytes + most_bytes / 2 + used_bytes);
    }
  }
  CHECK(arena.stats().reserved_bytes <= 2 * most_bytes);
}

TEST_CASE("host arena: a tensor of a kept arena can be resized, one of a model cannot") {
  HostArena kept(make_mapped_source(nullptr), HostArena::Empty::kKept);
  at::Tensor value = empty_strided(kept, {2, 3}, {1, 2}, at::kFloat);
  CHECK(value.sizes() == at::IntArrayRef{2, 3});
  CHECK(value.strides() == at::IntArrayRef{1, 2});
  CHECK(value.storage().nbytes() == 24);
  value.fill_(4);
  value.resize_({1000});
  CHECK(value.storage().nbytes() >= 4000);
  HostArena arena(make_mapped_source(nullptr));
  CHECK_THROWS(arena.allocate(100).resize_({1000}));
}

TEST_CASE("host arena: the process's arenas are counted together") {
  const HostArenaStats before = host_arena_stats();
  const at::Tensor first = HostArena::pageable().allocate(kMiB);
  const at::Tensor second = HostArena::page_locked().allocate(kMiB);
  CHECK(host_arena_stats().asked_bytes - before.asked_bytes == 2 * kMiB);
  CHECK(host_arena_stats().pieces - before.pieces == 2);
}
