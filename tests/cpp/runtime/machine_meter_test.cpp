#include <roundpipe/runtime/machine_meter.h>

#include <vector>

#include <doctest/doctest.h>

using namespace roundpipe::runtime;

namespace machine_meter_test {

constexpr int64_t kChunk_bytes = 64'000'000;

// A link's clock: sends chunks at `gb_per_s`, as a link would that keeps two in flight, and tells the meter.
struct Sender {
  std::shared_ptr<roundpipe::transfer::LinkObserver> observer;
  double now_ms = 1000;

  void send(int chunks, double gb_per_s, int64_t bytes = kChunk_bytes, double late_ms = 0) {
    double issued_ms = now_ms;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const double through_ms = now_ms + static_cast<double>(bytes) / (gb_per_s * 1e6);
      observer->arrived(bytes, issued_ms, through_ms + late_ms);
      issued_ms = now_ms;  // the next one waited behind this one
      now_ms = through_ms;
    }
  }
  void rest(double ms) { now_ms += ms; }
};

TEST_CASE("machine meter: a link's rate is what it sustains; resting and small transfers do not count") {
  MachineMeter meter(2);
  CHECK(meter.rates().links.size() == 2);
  CHECK(meter.rates().up_gb_per_s() == 0);
  CHECK(meter.rates().hop_latency_ms == 0);
  Sender up{meter.link(0, LinkWay::kUp)}, down{meter.link(0, LinkWay::kDown)};
  for (int burst = 0; burst < 5; ++burst) {
    up.send(3, 25);
    up.rest(100);
    up.send(1, 25, 1000, /*late_ms=*/0.25);
    up.rest(100);
    down.send(2, 12);
    down.rest(30);
    down.send(1, 12, 1000, /*late_ms=*/0.5);
    down.rest(30);
  }
  const MachineRates rates = meter.rates();
  CHECK(rates.links[0].up_gb_per_s == doctest::Approx(25).epsilon(0.02));
  CHECK(rates.links[0].down_gb_per_s == doctest::Approx(12).epsilon(0.02));
  CHECK(rates.links[1].up_gb_per_s == 0);
  CHECK(rates.up_gb_per_s() == rates.links[0].up_gb_per_s);  // the unknown link is not the slowest
  CHECK(rates.hop_latency_ms == doctest::Approx(0.75).epsilon(0.02));
  CHECK(rates.host_gb_per_s == 0);
}

TEST_CASE("machine meter: one odd stretch does not count, and a link that has become slower shows it in the end") {
  MachineMeter meter(1);
  Sender up{meter.link(0, LinkWay::kUp)};
  for (int burst = 0; burst < 4; ++burst) {
    up.send(3, burst == 2 ? 100 : 20);
    up.rest(10);
  }
  CHECK(meter.rates().up_gb_per_s() == doctest::Approx(20).epsilon(0.02));
  for (size_t burst = 0; burst < MachineMeter::kStretches; ++burst) {
    up.send(3, 10);
    up.rest(10);
  }
  CHECK(meter.rates().up_gb_per_s() == doctest::Approx(10).epsilon(0.02));
}

TEST_CASE("machine meter: small transfers that a busy machine holds up are no rate") {
  MachineMeter meter(1);
  Sender up{meter.link(0, LinkWay::kUp)};
  for (int burst = 0; burst < 40; ++burst) {
    up.send(1, 0.001, 16'000);  // 16 ms for what takes microseconds
    up.rest(10);
  }
  CHECK(meter.rates().up_gb_per_s() == 0);
}

TEST_CASE("machine meter: a link that never rests shows its rate, too") {
  MachineMeter meter(1);
  Sender down{meter.link(0, LinkWay::kDown)};
  down.send(100, 25);
  CHECK(meter.rates().down_gb_per_s() == doctest::Approx(25).epsilon(0.02));
}

TEST_CASE("machine meter: chunks that wake their waiter late do not make a link look faster") {
  MachineMeter meter(1);
  Sender up{meter.link(0, LinkWay::kUp)};
  for (int burst = 0; burst < 8; ++burst) {
    up.send(4, 8, kChunk_bytes, /*late_ms=*/burst % 3 * 0.2);
    up.rest(5);
  }
  CHECK(meter.rates().up_gb_per_s() <= 8.01);
  CHECK(meter.rates().up_gb_per_s() >= 7.6);
}

TEST_CASE("machine meter: the host counts once links that are busy together reach less than one by one") {
  for (const double host_gb_per_s : {0.0, 30.0}) {
    MachineMeter meter(2);
    std::vector<Sender> links{{meter.link(0, LinkWay::kUp)}, {meter.link(1, LinkWay::kUp)}};
    for (int round = 0; round < 6; ++round) {
      for (Sender& link : links) {  // one by one
        link.send(3, 25);
        links[0].now_ms = links[1].now_ms = link.now_ms + 10;
      }
      for (Sender& link : links) link.send(4, host_gb_per_s > 0 ? host_gb_per_s / 2 : 25);  // together
      links[0].rest(10);
      links[1].now_ms = links[0].now_ms;
    }
    const MachineRates rates = meter.rates();
    CHECK(rates.up_gb_per_s() == doctest::Approx(25).epsilon(0.02));
    CHECK(rates.host_gb_per_s == doctest::Approx(host_gb_per_s).epsilon(0.03));
  }
}

TEST_CASE("machine meter: links that are seldom busy together show no limit of the host") {
  MachineMeter meter(3);
  std::vector<Sender> links;
  for (int device = 0; device < 3; ++device) links.push_back({meter.link(device, LinkWay::kUp)});
  const auto together = [&](std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) links[i].send(4, 25);
    const double next_ms = links[0].now_ms + 10;
    for (Sender& link : links) link.now_ms = next_ms;
  };
  for (int round = 0; round < 6; ++round) together(2);
  together(3);  // faster than anything before, and as fast as the links are
  CHECK(meter.rates().host_gb_per_s == 0);
  for (int round = 0; round < 3; ++round) together(3);
  CHECK(meter.rates().host_gb_per_s == 0);
}

}  // namespace machine_meter_test
