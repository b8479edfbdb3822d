#include <roundpipe/runtime/model_planner.h>

#include <memory>
#include <vector>

#include <doctest/doctest.h>

#include "support/layers.h"

using namespace roundpipe;
using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using schedule::Phase;

namespace {

std::shared_ptr<ModelState> model_of(int layers) {
  std::vector<std::unique_ptr<Layer>> made;
  for (int l = 0; l < layers; ++l) made.push_back(std::make_unique<NativeLayer>(linear_layer("linear", 4)));
  return std::make_shared<ModelState>("planned", std::move(made), false);
}

// A device's record of one microbatch of a stage whose layers take `forward_ms`; their backward takes twice that.
ExecutionRecord record_of(Phase phase, schedule::Range layers, const std::vector<double>& forward_ms, double waited) {
  double ms = 0;
  for (int l = layers.first; l < layers.last; ++l)
    ms += forward_ms[static_cast<size_t>(l)] * (phase == Phase::kForward ? 1 : 3);
  return {phase, layers, 0, 0, 100, 100 + ms + waited, 0, waited};
}

}  // namespace

TEST_CASE("cost meter: single layers are known at once, stages after a few cuts, waiting left out") {
  const std::vector<double> truth{1, 4, 2, 3};
  const auto model = model_of(4);
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

TEST_CASE("model planner: plans anew once it has measured, and when times drift; never with replicas") {
  const auto model = model_of(8);
  Engine engine(device::parse_devices("virtual:2"));
  ModelPlanner planner(*model);
  const auto next = [&] { return planner.next(engine, schedule::PlanMode::kFused, 4, 0); };
  const auto observe = [&](const std::vector<double>& forward_ms) {
    std::vector<ExecutionRecord> records;
    for (int l = 0; l < 8; ++l) {
      records.push_back(record_of(Phase::kForward, {l, l + 1}, forward_ms, 0));
      records.push_back(record_of(Phase::kBackward, {l, l + 1}, forward_ms, 0));
    }
    planner.observe(records);
  };
  const auto stages_of = [](const schedule::Plan& plan) { return plan.backward_stages(); };
  const schedule::Plan first = next();
  schedule::validate(first, schedule::PlanMode::kFused);
  const std::vector<double> front{40, 1, 1, 1, 1, 1, 1, 1}, back{1, 1, 1, 1, 1, 1, 1, 40};
  observe(front);
  observe(front);
  const schedule::Plan measured = next();
  CHECK((stages_of(measured) != stages_of(first)));
  for (int call = 0; call < 6; ++call) CHECK((stages_of(next()) == stages_of(measured)));
  for (int call = 0; call < 20; ++call) observe(back);
  for (int call = 0; call < 3; ++call) next();
  const schedule::Plan drifted = next();
  schedule::validate(drifted, schedule::PlanMode::kFused);
  CHECK((stages_of(drifted) != stages_of(measured)));
  for (const schedule::Plan& plan : {first, measured, drifted}) {
    for (const schedule::Job& job : plan.jobs) CHECK((job.microbatches == schedule::Range{0, 4}));
  }
}
