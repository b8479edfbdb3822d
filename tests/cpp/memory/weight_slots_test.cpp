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
  const int first = slots.try_acquire(100, 0);
  const int second = slots.try_acquire(100, 0);
  CHECK(first >= 0);
  CHECK(second >= 0);
  CHECK(first != second);
  CHECK(slots.try_acquire(100, 0) == -1);
  slots.release(first);
  CHECK(slots.try_acquire(100, 0) == first);
}

TEST_CASE("slots: buffers are reused by stages of about their size, and count against the device") {
  const auto device = make_device("virtual:1");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  const int slot = slots.try_acquire(1000, 0);
  const void* memory = slots.buffer(slot, 1000).data_ptr();
  CHECK(device->memory().current_bytes == 1000);
  slots.release(slot);

  REQUIRE(slots.try_acquire(950, 0) == slot);
  at::Tensor smaller = slots.buffer(slot, 950);
  CHECK(smaller.data_ptr() == memory);
  CHECK(smaller.numel() >= 950);
  CHECK((smaller.scalar_type() == at::kByte));
  smaller.reset();
  slots.release(slot);

  for (const int64_t size_bytes : {2000, 500}) {
    REQUIRE(slots.try_acquire(size_bytes, 0) == slot);
    CHECK(slots.buffer(slot, size_bytes).numel() == size_bytes);
    CHECK(device->memory().current_bytes == size_bytes);
    slots.release(slot);
  }
}

TEST_CASE("slots: growing gives the old memory back first, so a stage of the whole cap fits") {
  const auto device = make_device("virtual:1,memory=4KiB");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  const int slot = slots.try_acquire(3000, 0);
  slots.buffer(slot, 3000);
  slots.release(slot);
  const int again = slots.try_acquire(4096, 0);
  REQUIRE(again >= 0);
  CHECK_NOTHROW(slots.buffer(again, 4096));
  CHECK(device->memory().current_bytes == 4096);
}

TEST_CASE("slots: the second slot is refused where it would leave less than the reserve") {
  const auto device = make_device("virtual:1,memory=10KB");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  const int first = slots.try_acquire(4000, 2000);
  REQUIRE(first >= 0);
  slots.buffer(first, 4000);
  CHECK(slots.try_acquire(4001, 2000) == -1);
  const int second = slots.try_acquire(4000, 2000);
  CHECK(second >= 0);
  slots.buffer(second, 4000);
  CHECK(device->memory().current_bytes == 8000);
}

TEST_CASE("slots: the first slot is always granted, and the idle one's memory makes way for it") {
  const auto device = make_device("virtual:1,memory=10KB");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  const int first = slots.try_acquire(3000, 0);
  slots.buffer(first, 3000);
  const int second = slots.try_acquire(3000, 0);
  slots.buffer(second, 3000);
  slots.release(first);
  slots.release(second);
  CHECK(device->memory().current_bytes == 6000);
  const int large = slots.try_acquire(8000, 2000);
  REQUIRE(large >= 0);
  CHECK_NOTHROW(slots.buffer(large, 8000));
  CHECK(device->memory().current_bytes == 8000);
}

TEST_CASE("slots: a released slot is NaN in debug mode") {
  const auto device = make_device("virtual:1,debug");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  const int slot = slots.try_acquire(400, 0);
  const at::Tensor weights = slots.buffer(slot, 400).view(at::kFloat);
  weights.fill_(1.0);
  slots.release(slot);
  CHECK(at::isnan(weights).all().item<bool>());
}

TEST_CASE("slots: memory that no held slot needs is given back, and so is that of a held one") {
  const auto device = make_device("virtual:1");
  const auto scope = device->compute().enter();
  WeightSlots slots(*device);
  for (int i = 0; i < WeightSlots::kSlots; ++i) slots.buffer(slots.try_acquire(100, 0), 100);
  for (int i = 0; i < WeightSlots::kSlots; ++i) slots.release(i);
  CHECK(slots.drop_idle());
  CHECK_FALSE(slots.drop_idle());
  CHECK(device->memory().current_bytes == 0);
}

TEST_CASE("slots: threads that share the slots never hold the same one") {
  const auto device = make_device("virtual:1,memory=1MiB,debug");
  WeightSlots slots(*device);
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
