#include <roundpipe/device/make_devices.h>
#include <roundpipe/memory/weight_slots.h>

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

using namespace roundpipe::memory;
using roundpipe::device::Device;
using roundpipe::device::make_devices;
using roundpipe::device::parse_devices;

namespace {

std::unique_ptr<Device> make_device(const std::string& text) {
  return std::move(make_devices(parse_devices(text)).front());
}

}  // namespace

TEST_CASE("slots: two may be held, a third may not until one is released") {
  const auto device = make_device("virtual:1");
  WeightSlots slots(*device);
  slots.expect(512);
  const int first = slots.try_acquire(256, 0);
  const int second = slots.try_acquire(256, 0);
  CHECK(first >= 0);
  CHECK(second >= 0);
  CHECK(first != second);
  CHECK(slots.try_acquire(256, 0) == -1);
  slots.release(first);
  CHECK(slots.try_acquire(256, 0) == first);
}

TEST_CASE("slots: one arena, whose ends jobs of any size take in turn, and nothing is allocated for them") {
  const auto device = make_device("virtual:1");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  const std::vector<int64_t> sizes{3072, 512, 1024, 2560, 256};
  int64_t pair_bytes = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    pair_bytes = std::max(pair_bytes, sizes[i] + sizes[(i + 1) % sizes.size()]);
  }
  slots.expect(pair_bytes);
  int running = slots.try_acquire(sizes[0], 0);
  at::Tensor weights = slots.buffer(running, sizes[0]);
  CHECK(device->memory().current_bytes == pair_bytes);
  for (size_t job = 1; job < 40; ++job) {
    const int64_t size_bytes = sizes[job % sizes.size()];
    const int next = slots.try_acquire(size_bytes, 0);
    REQUIRE(next == 1 - running);
    const at::Tensor uploaded = slots.buffer(next, size_bytes);
    CHECK(uploaded.numel() == size_bytes);
    weights.fill_(1);
    uploaded.fill_(2);
    CHECK(weights.eq(1).all().item<bool>());
    slots.release(running);
    running = next;
    weights = uploaded;
  }
  CHECK(device->memory().peak_bytes < pair_bytes + 4096);  // plus the comparisons' own memory
}

TEST_CASE("slots: the arena grows once nobody holds a slot, and gives the old memory back first") {
  const auto device = make_device("virtual:1,memory=4KiB");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  slots.expect(2048);
  const int first = slots.try_acquire(1024, 0);
  slots.buffer(first, 1024);
  slots.expect(4096);
  CHECK(slots.try_acquire(2048, 0) == -1);
  slots.release(first);
  const int again = slots.try_acquire(2048, 0);
  REQUIRE(again >= 0);
  CHECK_NOTHROW(slots.buffer(again, 2048));
  CHECK(device->memory().current_bytes == 4096);
  CHECK(slots.try_acquire(2048, 0) == 1 - again);
  // A smaller plan does not shrink it.
  slots.release(again);
  slots.release(1 - again);
  slots.expect(512);
  CHECK(slots.try_acquire(256, 0) >= 0);
  CHECK(device->memory().current_bytes == 4096);
}

TEST_CASE("slots: the first is always granted, and an arena that stands in its way goes") {
  const auto device = make_device("virtual:1,memory=10KB");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  slots.expect(6144);
  const int first = slots.try_acquire(3072, 0);
  slots.buffer(first, 3072);
  slots.release(first);
  CHECK(device->memory().current_bytes == 6144);
  const int careful = slots.try_acquire(3072, 6000);
  slots.buffer(careful, 3072);
  CHECK(device->memory().current_bytes == 3072);
  CHECK(slots.try_acquire(3072, 6000) == -1);
  slots.release(careful);
  const int large = slots.try_acquire(8192, 4000);
  REQUIRE(large >= 0);
  CHECK_NOTHROW(slots.buffer(large, 8192));
  CHECK(device->memory().current_bytes == 8192);
}

TEST_CASE("slots: once they are separate, what is held stays, and one can be given up without the other") {
  const auto device = make_device("virtual:1");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  slots.expect(3000);
  const int first = slots.try_acquire(1000, 0);
  at::Tensor before = slots.buffer(first, 1000).fill_(7);
  CHECK(slots.together());
  CHECK(slots.separate());
  CHECK_FALSE(slots.separate());
  CHECK_FALSE(slots.together());
  CHECK(before.eq(7).all().item<bool>());
  before.reset();
  CHECK(device->memory().current_bytes == 0);
  slots.buffer(first, 1000);
  const int second = slots.try_acquire(2000, 0);
  slots.buffer(second, 2000);
  CHECK(device->memory().current_bytes == 3000);
  CHECK(slots.drop(second));
  CHECK_FALSE(slots.drop(second));
  CHECK(device->memory().current_bytes == 1000);
  slots.release(first);
  slots.release(second);
  // Memory of about the requested size is reused; otherwise new memory is allocated.
  const int again = slots.try_acquire(950, 0);
  CHECK(again == first);
  CHECK(slots.buffer(again, 950).numel() == 950);
  CHECK(device->memory().current_bytes == 1000);
  slots.release(again);
  REQUIRE(slots.try_acquire(500, 0) == again);
  CHECK(slots.buffer(again, 500).numel() == 500);
  CHECK(device->memory().current_bytes == 500);
}

TEST_CASE("slots: a second one of its own is refused where it would leave less than the reserve") {
  const auto device = make_device("virtual:1,memory=10KB");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  slots.separate();
  const int first = slots.try_acquire(4000, 2000);
  REQUIRE(first >= 0);
  slots.buffer(first, 4000);
  CHECK(slots.try_acquire(4001, 2000) == -1);
  const int second = slots.try_acquire(4000, 2000);
  CHECK(second >= 0);
  slots.buffer(second, 4000);
  slots.release(first);
  slots.release(second);
  // The idle slot's memory is freed for a job that is alone.
  const int large = slots.try_acquire(8000, 2000);
  REQUIRE(large >= 0);
  CHECK_NOTHROW(slots.buffer(large, 8000));
  CHECK(device->memory().current_bytes == 8000);
}

TEST_CASE("slots: a released slot is NaN in debug mode, and the other one is left alone") {
  const auto device = make_device("virtual:1,debug");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  slots.expect(1024);
  const int slot = slots.try_acquire(512, 0), other = slots.try_acquire(512, 0);
  const at::Tensor weights = slots.buffer(slot, 512).view(at::kFloat), next = slots.buffer(other, 512).view(at::kFloat);
  weights.fill_(1.0);
  next.fill_(2.0);
  slots.release(slot);
  CHECK(at::isnan(weights).all().item<bool>());
  CHECK(next.eq(2.0).all().item<bool>());
}

TEST_CASE("slots: memory that no held slot needs is given back") {
  const auto device = make_device("virtual:1");
  const auto scope = device->compute().enter();
  for (const bool apart : {false, true}) {
    WeightSlots slots(*device);
    slots.expect(512);
    if (apart) slots.separate();
    for (int i = 0; i < WeightSlots::kSlots; ++i) slots.buffer(slots.try_acquire(256, 0), 256);
    CHECK_FALSE(slots.drop_idle());
    for (int i = 0; i < WeightSlots::kSlots; ++i) slots.release(i);
    CHECK(slots.drop_idle());
    CHECK_FALSE(slots.drop_idle());
    CHECK(device->memory().current_bytes == 0);
  }
}

TEST_CASE("slots: threads that share the slots never hold the same one") {
  const auto device = make_device("virtual:1,memory=1MiB,debug");
  WeightSlots slots(*device);
  slots.expect(8192);
  std::vector<std::atomic<int>> holders(WeightSlots::kSlots);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto scope = device->upload().enter();
      for (int round = 0; round < 300;) {
        const int64_t size_bytes = 4 * (1 + (round * 31 + t * 7) % 500);
        const int slot = slots.try_acquire(size_bytes, 0);
        if (slot < 0) {
          std::this_thread::yield();
          continue;
        }
        CHECK(holders[slot].fetch_add(1) == 0);
        const at::Tensor weights = slots.buffer(slot, size_bytes);
        weights.fill_(t);
        CHECK(weights[size_bytes - 1].item<int64_t>() == t);
        holders[slot].fetch_sub(1);
        slots.release(slot);
        ++round;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}
