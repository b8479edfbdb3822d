#include <roundpipe/device/virtual/virtual_device.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/core/clock.h>
#include <roundpipe/device/make_devices.h>

using namespace roundpipe;
using namespace roundpipe::device;

namespace {

std::unique_ptr<Device> make_device(const std::string& text) {
  return std::move(make_devices(parse_devices(text)).front());
}

double ms_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double, std::milli>(to - from).count();
}

}  // namespace

TEST_CASE("virtual device: name, kind and limits come from the spec") {
  const auto devices = make_devices(parse_devices("virtual:2,memory=3MiB"));
  REQUIRE(devices.size() == 2);
  CHECK(devices[1]->name() == "virtual:1");
  CHECK(devices[1]->is_virtual());
  CHECK(devices[1]->torch_device().is_cpu());
  CHECK(devices[1]->memory().limit_bytes == 3 << 20);
  CHECK_FALSE(devices[1]->wants_pinned_host_memory());
}

TEST_CASE("virtual device: an accelerator that is not there is the caller's mistake") {
  CHECK_THROWS_AS(make_devices(parse_devices("nosuchcard:0")), std::invalid_argument);
}

TEST_CASE("virtual device: compute and upload queues allocate on the device, download on the host") {
  const auto device = make_device("virtual:1");
  const auto allocated_bytes = [&](Queue& queue) {
    const auto scope = queue.enter();
    const at::Tensor tensor = at::empty({1000}, at::kByte);
    return device->memory().current_bytes;
  };
  CHECK(allocated_bytes(device->compute()) == 1000);
  CHECK(allocated_bytes(device->upload()) == 1000);
  CHECK(allocated_bytes(device->download()) == 0);
  CHECK(device->memory().peak_bytes == 1000);
  device->reset_peak_memory();
  CHECK(device->memory().peak_bytes == 0);
}

TEST_CASE("virtual device: devices do not share memory accounts") {
  const auto devices = make_devices(parse_devices("virtual:2,memory=1KiB"));
  const auto scope = devices[0]->compute().enter();
  const at::Tensor tensor = at::empty({1024}, at::kByte);
  CHECK(devices[0]->memory().current_bytes == 1024);
  CHECK(devices[1]->memory().current_bytes == 0);
  CHECK_THROWS_AS(at::empty({1}, at::kByte), c10::OutOfMemoryError);
  const auto inner = devices[1]->compute().enter();
  CHECK_NOTHROW(at::empty({1024}, at::kByte));
}

TEST_CASE("virtual queue: copies dense, strided, permuted, expanded, converted-layout and empty tensors") {
  const auto device = make_device("virtual:1");
  Queue& queue = device->upload();
  const auto scope = queue.enter();
  const at::Tensor base = at::arange(120, at::kFloat).view({2, 3, 4, 5});
  const std::vector<at::Tensor> sources = {
      base,
      base.permute({0, 2, 3, 1}),
      base.contiguous(at::MemoryFormat::ChannelsLast),
      base.slice(3, 0, 5, 2),
      base.select(1, 1),
      at::arange(5, at::kFloat).expand({3, 5}),
      at::tensor(7.0f),
      at::empty({0, 4}),
      at::complex(base, -base).conj(),
      at::arange(9, at::kBFloat16),
  };
  for (const at::Tensor& source : sources) {
    CAPTURE(source.sizes());
    const at::Tensor same = at::empty_like(source);
    queue.copy(same, source);
    CHECK(at::equal(same, source));
    const at::Tensor contiguous = at::empty(source.sizes(), source.options());
    queue.copy(contiguous, source);
    CHECK(at::equal(contiguous, source));
    const at::Tensor room = at::zeros({source.numel() * 2 + 1}, source.options());
    const at::Tensor part = room.narrow(0, 1, source.numel()).view(source.sizes());
    queue.copy(part, source);
    CHECK(at::equal(part, source));
    CHECK(at::equal(room.narrow(0, source.numel() + 1, source.numel()), at::zeros({source.numel()}, source.options())));
  }
}

TEST_CASE("virtual queue: a signal fires after the work before it") {
  const auto device = make_device("virtual:1");
  const at::Tensor source = at::arange(1000);
  const at::Tensor target = at::zeros_like(source);
  const EventPtr copied = make_event();
  std::thread worker([&] {
    const auto scope = device->upload().enter();
    device->upload().copy(target, source);
    device->upload().signal(copied);
  });
  copied->wait();
  CHECK(at::equal(target, source));
  worker.join();
}

TEST_CASE("virtual queue: emulated time of back-to-back layers adds up, and wake-up delays do not") {
  const auto device = make_device("virtual:1");
  const Clock::time_point start = Clock::now();
  for (int layer = 0; layer < 10; ++layer) device->compute().emulate(2.0);
  CHECK(ms_between(start, Clock::now()) >= 19.9);
}

TEST_CASE("virtual device: poison turns numbers into NaN in debug mode only") {
  const at::Tensor kept = at::ones({4});
  make_device("virtual:1")->poison(kept);
  CHECK(at::equal(kept, at::ones({4})));
  for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
    const at::Tensor poisoned = at::ones({4}, dtype);
    make_device("virtual:1,debug")->poison(poisoned);
    CHECK(at::isnan(poisoned).all().item<bool>());
  }
  CHECK_NOTHROW(make_device("virtual:1,debug")->poison(at::Tensor()));
}

TEST_CASE("throttle: bookings queue up behind each other at the link's bandwidth") {
  LinkThrottle link(2.0);  // 2 GB/s = 2e6 bytes a millisecond
  const Clock::time_point before = Clock::now();
  const Clock::time_point first = link.book(2'000'000'000'000);
  const Clock::time_point after = Clock::now();
  CHECK(ms_between(before, first) >= 1e6);
  CHECK(ms_between(after, first) <= 1e6);
  // The link is reserved for a thousand seconds ahead, so these checks do not depend on the clock.
  CHECK(ms_between(first, link.book(1'000'000)) == doctest::Approx(0.5));
  CHECK(ms_between(first, link.book(3'000'000)) == doctest::Approx(2.0));
  CHECK(ms_between(first, link.book(0)) == doctest::Approx(2.0));
}

TEST_CASE("throttle: what was there before it is booked begins when it was there, or when the link is free") {
  LinkThrottle link(1.0);
  const Clock::time_point past = Clock::now() - from_ms(10);
  const Clock::time_point first = link.book(2'000'000, past);
  CHECK(ms_between(past, first) == doctest::Approx(2.0));
  CHECK(ms_between(past, link.book(1'000'000, past)) == doctest::Approx(3.0));
  CHECK(ms_between(past, link.book(1'000'000, past + from_ms(5))) == doctest::Approx(6.0));
}

TEST_CASE("throttle: a large copy books the host little by little, so that others have their turns") {
  const auto host = std::make_shared<LinkThrottle>(0.02);
  const std::unique_ptr<Device> device = make_virtual_device(parse_devices("virtual:1").front(), host);
  // 100 ms of host time.
  const at::Tensor large = at::zeros({2'000'000}, at::kByte);
  std::atomic<bool> done = false;
  std::thread copying([&] {
    const auto scope = device->upload().enter();
    device->upload().copy(at::empty_like(large), large);
    done = true;
  });
  double most_ms = 0;
  while (!done) {
    const Clock::time_point booked = host->book(0, {});
    most_ms = std::max(most_ms, ms_between(Clock::now(), booked));
    std::this_thread::yield();
  }
  copying.join();
  CHECK(most_ms <= 1.0);
}

TEST_CASE("throttle: an idle link does not save up its bandwidth") {
  LinkThrottle link(1.0);
  const Clock::time_point first = link.book(1'000'000);
  while (Clock::now() < first + from_ms(3)) std::this_thread::yield();
  const Clock::time_point before = Clock::now();
  CHECK(ms_between(before, link.book(1'000'000)) >= 1.0);
}

TEST_CASE("throttle: bookings of many threads add up") {
  LinkThrottle link(1.0);
  const Clock::time_point first = link.book(1'000'000'000'000);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 250; ++i) link.book(1'000'000);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(ms_between(first, link.book(0)) == doctest::Approx(1000.0).epsilon(1e-6));
}

TEST_CASE("throttle: a device's two directions have a link each, and all devices share the host's") {
  const at::Tensor source = at::zeros({2'000'000}, at::kByte);
  const auto copy_ms = [&](const std::vector<Queue*>& queues) {
    const Clock::time_point start = Clock::now();
    std::vector<std::thread> threads;
    for (Queue* queue : queues) {
      threads.emplace_back([&, queue] {
        const auto scope = queue->enter();
        queue->copy(at::empty_like(source), source);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return ms_between(start, Clock::now());
  };
  // 2 MB at 0.1 GB/s are 20 ms.
  const auto linked = make_devices(parse_devices("virtual:2,link=0.1GB/s"));
  CHECK(copy_ms({&linked[0]->upload()}) >= 20.0);
  const auto hosted = make_devices(parse_devices("virtual:2,host=0.1GB/s"));
  CHECK(copy_ms({&hosted[0]->upload(), &hosted[1]->upload(), &hosted[0]->download()}) >= 60.0);
}
