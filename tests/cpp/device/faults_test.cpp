#include <roundpipe/device/virtual/faults.h>

#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/device/make_devices.h>

using namespace roundpipe;
using namespace roundpipe::device;

namespace {

std::unique_ptr<Device> make_device(const std::string& text) {
  return std::move(make_devices(parse_devices(text)).front());
}

// Where the first byte that differs is; -1: nowhere.
int64_t first_difference(const at::Tensor& a, const at::Tensor& b) {
  const auto* const x = static_cast<const uint8_t*>(a.data_ptr());
  const auto* const y = static_cast<const uint8_t*>(b.data_ptr());
  for (size_t i = 0; i < a.nbytes(); ++i) {
    if (x[i] != y[i]) return static_cast<int64_t>(i);
  }
  return -1;
}

}  // namespace

TEST_CASE("faults: an error comes at its microbatch, from every queue, and stays") {
  const auto device = make_device("virtual:1,fail=error@3");
  const at::Tensor from = at::ones({8}), to = at::zeros({8});
  int told = 0;
  device->health()->on_failure([&] { ++told; });
  for (int i = 0; i < 2; ++i) CHECK_NOTHROW(device->begin_microbatch());
  CHECK_NOTHROW(device->upload().copy(to, from));
  CHECK_THROWS_WITH_AS(device->begin_microbatch(), doctest::Contains("[virtual:0] the device failed"), DeviceError);
  CHECK(told == 1);
  CHECK_THROWS_AS(device->begin_microbatch(), DeviceError);
  CHECK_THROWS_AS(device->upload().copy(to, from), DeviceError);
  CHECK_THROWS_AS(device->download().copy(to, from), DeviceError);
  for (Queue* queue : {&device->compute(), &device->upload(), &device->download()}) {
    CHECK_THROWS_AS(queue->mark()->wait(), DeviceError);
  }
  CHECK(told == 1);
}

TEST_CASE("faults: a hang lasts until it is released, and then the device goes on") {
  const auto device = make_device("virtual:1,fail=hang@2");
  device->begin_microbatch();
  std::thread thread([&] { device->begin_microbatch(); });
  while (!device->hangs()) std::this_thread::yield();
  device->release_hang();
  thread.join();
  CHECK_FALSE(device->hangs());
  CHECK_NOTHROW(device->begin_microbatch());
}

TEST_CASE("faults: a device that was given up while it hung returns errors when it goes on") {
  const auto device = make_device("virtual:1,fail=hang@1");
  std::thread thread([&] { CHECK_THROWS_WITH_AS(device->begin_microbatch(), "too long", DeviceError); });
  while (!device->hangs()) std::this_thread::yield();
  device->health()->fail(DeviceError("too long"));
  device->health()->fail(DeviceError("not the first"));
  device->release_hang();
  thread.join();
}

TEST_CASE("faults: wrong bits are one bit of each copy to the host") {
  const auto device = make_device("virtual:1,fail=bits@2");
  const at::Tensor from = at::randn({100});
  const auto copied = [&](Queue& queue) {
    at::Tensor to = at::zeros({100});
    queue.copy(to, from);
    return to;
  };
  device->begin_microbatch();
  CHECK(first_difference(copied(device->download()), from) == -1);
  device->begin_microbatch();
  CHECK(first_difference(copied(device->upload()), from) == -1);
  const at::Tensor wrong = copied(device->download());
  CHECK(first_difference(wrong, from) == 0);
  CHECK(first_difference(wrong.narrow(0, 1, 99), from.narrow(0, 1, 99)) == -1);
}

TEST_CASE("faults: a slow device takes longer for each microbatch, and computes the same") {
  const auto device = make_device("virtual:1,fail=slow@2+1ms");
  for (int i = 0; i < 3; ++i) CHECK_NOTHROW(device->begin_microbatch());
  CHECK_FALSE(device->health()->failed());
}

TEST_CASE("faults: one that is set later counts from then on") {
  const auto device = make_device("virtual:1");
  for (int i = 0; i < 5; ++i) device->begin_microbatch();
  device->inject(parse_fault("error@2"));
  CHECK_NOTHROW(device->begin_microbatch());
  CHECK_THROWS_AS(device->begin_microbatch(), DeviceError);
  CHECK_THROWS_AS(device->health()->check(), DeviceError);
}

TEST_CASE("health: who asks after the failure is told at once") {
  Health health("virtual:0");
  CHECK_NOTHROW(health.check());
  CHECK(health.failure() == nullptr);
  health.fail(DeviceError("gone"));
  int told = 0;
  health.on_failure([&] { ++told; });
  CHECK(told == 1);
}

TEST_CASE("health: an error counts as the device's if the device cannot finish its work either") {
  Health health("card:0");
  CHECK(health.failure_after_error() == nullptr);
  health.probe_with([] {});
  CHECK(health.failure_after_error() == nullptr);
  health.probe_with([] { throw std::runtime_error("lost"); });
  CHECK_FALSE(health.failed());
  REQUIRE(health.failure_after_error());
  CHECK_THROWS_WITH_AS(health.check(), "[card:0] the device failed, and its error does not go away: lost", DeviceError);
}
