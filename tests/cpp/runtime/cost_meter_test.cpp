#include <roundpipe/runtime/cost_meter.h>

#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include "support/layers.h"

using namespace roundpipe;
using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using schedule::Phase;

namespace cost_meter_test {

std::shared_ptr<ModelState> model_of(int layers, int64_t width) {
  std::vector<std::unique_ptr<Layer>> made;
  for (int l = 0; l < layers; ++l) made.push_back(std::make_unique<NativeLayer>(linear_layer("linear", width)));
  return std::make_shared<ModelState>("metered", std::move(made), false);
}

// A device's record of one microbatch of a stage whose layers take `forward_ms`; their backward takes twice that.
ExecutionRecord record_of(Phase phase, schedule::Range layers, const std::vector<double>& forward_ms, double waited) {
  double ms = 0;
  for (int l = layers.first; l < layers.last; ++l)
    ms += forward_ms[static_cast<size_t>(l)] * (phase == Phase::kForward ? 1 : 3);
  return {phase, layers, 0, 0, 100, 100 + ms + waited, 0, waited};
}

// The times of a call in which layer l ran on device (l + call) % devices, where `noise` changes each by turns.
std::vector<LayerTime> times_of(const std::vector<double>& forward_ms, const std::vector<double>& speeds, int call,
                                double noise) {
  std::vector<LayerTime> times;
  for (int l = 0; l < static_cast<int>(forward_ms.size()); ++l) {
    const int device = (l + call) % static_cast<int>(speeds.size());
    const double off = 1 + (((l * 7 + call * 3 + device * 5) % 5) - 2) * noise / 2;
    const double ms = forward_ms[static_cast<size_t>(l)] / speeds[static_cast<size_t>(device)] * off;
    times.push_back({l, device, false, ms, 1000 + l});
    times.push_back({l, device, true, 2 * ms});
  }
  return times;
}

TEST_CASE("cost meter: single layers are known at once, stages after a few cuts, waiting left out") {
  const std::vector<double> truth{1, 4, 2, 3};
  const auto model = model_of(4, 4);
  CostMeter meter(*model);
  CHECK(!meter.knows(false, 1));
  for (int call = 0; call < 200; ++call) {
    std::vector<ExecutionRecord> records;
    const int cut = 1 + call % 3;
    for (const schedule::Range stage : {schedule::Range{0, cut}, schedule::Range{cut, 4}}) {
      records.push_back(record_of(Phase::kForward, stage, truth, 0));
      records.push_back(record_of(Phase::kBackward, stage, truth, 50));
    }
    meter.add(records);
  }
  CHECK(meter.knows(true, 2));
  const schedule::LayerCosts costs = meter.costs();
  for (size_t l = 0; l < truth.size(); ++l) {
    CHECK(costs[l].forward_ms == doctest::Approx(truth[l]).epsilon(0.02));
    CHECK(costs[l].backward_ms == doctest::Approx(2 * truth[l]).epsilon(0.02));
  }
}

TEST_CASE("cost meter: layers timed on cards of unequal speed cost what they cost on the fastest") {
  const std::vector<double> truth{1, 4, 2, 3, 1, 1};
  const auto model = model_of(6, 4);
  CostMeter meter(*model);
  const std::vector<double> speeds{1, 0.5, 1};
  for (int call = 0; call < 40; ++call) meter.add({}, times_of(truth, speeds, call, 0.02));
  const std::vector<double> found = meter.speeds(3);
  for (size_t d = 0; d < speeds.size(); ++d) CHECK(found[d] == doctest::Approx(speeds[d]).epsilon(0.03));
  const schedule::LayerCosts costs = meter.costs();
  for (size_t l = 0; l < truth.size(); ++l) {
    CHECK(costs[l].forward_ms == doctest::Approx(truth[l]).epsilon(0.05));
    CHECK(costs[l].backward_ms == doctest::Approx(2 * truth[l]).epsilon(0.05));
    CHECK(costs[l].activation_bytes == static_cast<int64_t>(1000 + l));
  }
  meter.forget_devices();
  CHECK((meter.speeds(3) == std::vector<double>{1, 1, 1}));
}

TEST_CASE("cost meter: times that vary as much as devices differ say nothing about their speed") {
  const std::vector<double> truth{1, 4, 2, 3, 1, 1};
  const auto model = model_of(6, 4);
  const std::vector<double> alike{1, 1, 1};
  CostMeter noisy(*model);
  for (int call = 0; call < 40; ++call) noisy.add({}, times_of(truth, alike, call, 0.6));
  CHECK((noisy.speeds(3) == alike));
  CostMeter once(*model);
  once.add({}, times_of(truth, {1, 0.5, 1}, 0, 0));
  CHECK((once.speeds(3) == alike));  // a first call includes choices of kernels
}

TEST_CASE("cost meter: gradients count as they travel, and only those of trainable layers") {
  const auto model = model_of(3, 8);
  CostMeter meter(*model);
  for (const schedule::LayerCost& cost : meter.costs()) {
    CHECK(cost.weight_bytes > 0);
    CHECK(cost.gradient_bytes == cost.weight_bytes);  // fp32 weights
    CHECK(cost.saved_bytes == 0);
  }
  meter.set_bytes({10, 20, 30}, {1, 2, 3});
  CHECK(meter.costs()[1].saved_bytes == 20);
  CHECK(meter.costs()[2].activation_bytes == 3);
}

}  // namespace cost_meter_test
