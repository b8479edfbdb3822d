#include <roundpipe/device/make_devices.h>
#include <roundpipe/transfer/link_scheduler.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

using namespace roundpipe::transfer;
using roundpipe::device::Device;
using roundpipe::device::EventPtr;
using roundpipe::device::make_devices;
using roundpipe::device::make_event;
using roundpipe::device::parse_devices;
using roundpipe::device::set_completion_hook;

namespace {

// Delays every completion by some turns of other threads.
class RandomDelays {
 public:
  RandomDelays() {
    set_completion_hook([] {
      thread_local std::mt19937 random(static_cast<unsigned>(std::hash<std::thread::id>()(std::this_thread::get_id())));
      for (unsigned turn = random() % 8; turn > 0; --turn) std::this_thread::yield();
    });
  }
  ~RandomDelays() { set_completion_hook(nullptr); }
};

uint64_t checksum(const at::Tensor& tensor) {
  const auto* bytes = static_cast<const uint8_t*>(tensor.data_ptr());
  uint64_t sum = 14695981039346656037ULL;  // FNV-1a
  for (size_t i = 0; i < tensor.nbytes(); ++i) sum = (sum ^ bytes[i]) * 1099511628211ULL;
  return sum;
}

void spoil(const at::Tensor& tensor) {
  if (tensor.defined() && tensor.nbytes() > 0) std::memset(tensor.data_ptr(), 0xFF, tensor.nbytes());
}

enum class Fate { kArrives, kThrows, kGivenUp, kDependencyFails };

// One upload to a device and the download back. Each end is overwritten as soon as the link says that it is done with
// it.
struct Trip {
  Fate fate = Fate::kArrives;
  at::Tensor source;
  uint64_t sum = 0;
  at::Tensor back;
  std::shared_ptr<at::Tensor> on_device = std::make_shared<at::Tensor>();
  EventPtr gate = make_event();
  EventPtr uploaded = make_event();
  EventPtr up_settled = make_event();
  EventPtr returned = make_event();
  EventPtr down_settled = make_event();
};

std::vector<Piece> cut(const at::Tensor& dst, const at::Tensor& src, unsigned pieces) {
  std::vector<Piece> list;
  const auto to = dst.chunk(pieces), from = src.chunk(pieces);
  for (size_t i = 0; i < to.size(); ++i) list.push_back({to[i], from[i]});
  return list;
}

void submit(Trip& trip, Device& device, LinkScheduler& up, LinkScheduler& down, std::mt19937& random) {
  const auto priority = [&] { return static_cast<Priority>(random() % kPriorities); };
  const unsigned pieces = 1 + random() % 3;
  up.submit({priority(),
             {trip.gate},
             [&device, on_device = trip.on_device, source = trip.source, throws = trip.fate == Fate::kThrows, pieces] {
               if (throws) throw std::runtime_error("begin");
               *on_device = at::empty(source.sizes(), source.options());
               device.poison(*on_device);
               return cut(*on_device, source, pieces);
             },
             trip.uploaded,
             trip.up_settled});
  down.submit({priority(),
               {trip.uploaded},
               [on_device = trip.on_device, back = trip.back, pieces] { return cut(back, *on_device, pieces); },
               trip.returned,
               trip.down_settled});
  trip.up_settled->then([source = trip.source] { spoil(source); });
  trip.down_settled->then([on_device = trip.on_device] { on_device->reset(); });
}

}  // namespace

TEST_CASE("link: any interleaving of transfers, errors and cancellations moves every byte once and touches no other") {
  const RandomDelays delays;
  constexpr int kThreads = 3;
  constexpr int kTrips = 120;
  // So little memory that uploads often have to wait for it.
  const auto devices = make_devices(parse_devices("virtual:2,memory=96KiB,chunk=3KB,debug"));
  std::vector<std::unique_ptr<LinkScheduler>> up, down;
  for (const auto& device : devices) {
    up.push_back(std::make_unique<LinkScheduler>(device->upload(), device->link_options()));
    down.push_back(std::make_unique<LinkScheduler>(device->download(), device->link_options()));
  }
  std::atomic<bool> over{false};
  std::thread maker([&] {
    while (!over.load()) {
      for (const auto& link : up) link->resume();
      std::this_thread::yield();
    }
  });
  std::atomic<int> arrived{0}, wrong{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(static_cast<unsigned>(100 + t));
      std::vector<Trip> trips(kTrips);
      for (Trip& trip : trips) {
        constexpr Fate kFates[] = {Fate::kArrives, Fate::kArrives, Fate::kArrives,
                                   Fate::kThrows,  Fate::kGivenUp, Fate::kDependencyFails};
        trip.fate = kFates[random() % 6];
        trip.source = at::arange(static_cast<int64_t>(1 + random() % 2500), at::kInt) * static_cast<int>(random() % 99);
        trip.sum = checksum(trip.source);
        trip.back = at::zeros_like(trip.source);
        const size_t device = random() % devices.size();
        submit(trip, *devices[device], *up[device], *down[device], random);
        if (random() % 2 == 0 && trip.fate != Fate::kDependencyFails) trip.gate->fire();
      }
      for (Trip& trip : trips) {
        const auto error = std::make_exception_ptr(std::domain_error("given up"));
        if (trip.fate == Fate::kDependencyFails) trip.gate->fail(error);
        if (trip.fate == Fate::kGivenUp) (random() % 2 == 0 ? trip.uploaded : trip.returned)->fail(error);
        trip.gate->fire();
      }
      for (Trip& trip : trips) {
        trip.returned->wait_complete();
        if (!trip.returned->error()) {
          ++arrived;
          if (checksum(trip.back) != trip.sum) ++wrong;
        } else if (trip.fate == Fate::kArrives) {
          ++wrong;
        }
        trip.up_settled->wait_complete();
        trip.down_settled->wait_complete();
        spoil(trip.back);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  over.store(true);
  maker.join();
  CHECK(wrong.load() == 0);
  CHECK(arrived.load() >= kThreads * kTrips / 3);
  up.clear();
  down.clear();
  for (const auto& device : devices) CHECK(device->memory().current_bytes == 0);
}
