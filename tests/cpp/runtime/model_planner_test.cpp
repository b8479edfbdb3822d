#include <roundpipe/runtime/model_planner.h>

#include <algorithm>
#include <memory>
#include <vector>

#include <roundpipe/core/error.h>
#include <roundpipe/schedule/gradient_groups.h>
#include <roundpipe/simulate/link_search.h>

#include <doctest/doctest.h>

#include "../rounds.h"
#include "support/layers.h"

using namespace roundpipe;
using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;
using schedule::Phase;

namespace model_planner_test {

std::shared_ptr<ModelState> model_of(int layers) {
  std::vector<std::unique_ptr<Layer>> made;
  for (int l = 0; l < layers; ++l) made.push_back(std::make_unique<NativeLayer>(linear_layer("linear", 4)));
  return std::make_shared<ModelState>("planned", std::move(made), false);
}

// Of a model of so many layers, all of which train.
PlanRequest fused(int layers, int microbatches, int gradient_groups = 1) {
  return {schedule::PlanMode::kFused,
          microbatches,
          gradient_groups,
          RecomputeGrain::kStage,
          0,
          std::vector<char>(static_cast<size_t>(layers), 1)};
}

// A device's record of one microbatch of a layer whose forward takes `forward_ms`, and its backward twice that.
ExecutionRecord record_of(Phase phase, int layer, double forward_ms) {
  const double ms = forward_ms * (phase == Phase::kForward ? 1 : 3);
  return {phase, {layer, layer + 1}, 0, 0, 100, 100 + ms, 0, 0};
}

TEST_CASE("model planner: plans anew once it has measured, and when times drift") {
  const auto model = model_of(8);
  Engine engine(device::parse_devices("virtual:2"));
  ModelPlanner planner(*model);
  const auto next = [&] { return planner.next(engine, fused(8, 4)); };
  const auto observe = [&](const std::vector<double>& forward_ms) {
    ExecutionLog log;
    for (int l = 0; l < 8; ++l) {
      log.add(record_of(Phase::kForward, l, forward_ms[static_cast<size_t>(l)]));
      log.add(record_of(Phase::kBackward, l, forward_ms[static_cast<size_t>(l)]));
    }
    planner.observe(log);
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
    // One group of gradients: no device has a part of it.
    for (const schedule::Job& job : plan.jobs) {
      if (job.phase != Phase::kForward) CHECK((job.microbatches == schedule::Range{0, 4}));
    }
  }
}

// Teaches the planner calls whose layers take `forward_ms`, and twice that backward, on each of two devices by turns.
void teach(ModelPlanner& planner, const std::vector<double>& forward_ms, int64_t output_bytes = 0) {
  for (int call = 0; call < 4; ++call) {
    ExecutionLog log;
    for (int l = 0; l < static_cast<int>(forward_ms.size()); ++l) {
      const double ms = forward_ms[static_cast<size_t>(l)];
      log.add(LayerTime{l, call % 2, false, ms, output_bytes});
      log.add(LayerTime{l, call % 2, true, 2 * ms});
    }
    planner.observe(log);
  }
}

bool overlaps(const schedule::Plan& plan) {
  return std::ranges::any_of(plan.jobs, [](const schedule::Job& job) { return job.order >= 1; });
}

// Tells the engine's meter of transfers at `gb_per_s` on every link.
void move(Engine& engine, double gb_per_s) {
  constexpr int64_t kBytes = 50'000'000;
  double now_ms = 0;
  for (int device = 0; device < engine.size(); ++device) {
    for (const LinkWay way : {LinkWay::kUp, LinkWay::kDown}) {
      for (int burst = 0; burst < 3; ++burst) {
        const double took_ms = static_cast<double>(kBytes) / (gb_per_s * 1e6);
        engine.meter().link(device, way)->arrived(kBytes, now_ms, now_ms + took_ms);
        now_ms += took_ms + 10;
      }
    }
  }
}

TEST_CASE("model planner: what waits on the host has room there, if any plan can do that") {
  const auto model = model_of(12);
  Engine engine(device::parse_devices("virtual:4"));
  constexpr int64_t kOutputs = 1000;
  const auto waiting = [&](int64_t room) {
    ModelPlanner planner(*model);
    teach(planner, std::vector<double>(12, 10.0), kOutputs);
    planner.set_host_room(room);
    const schedule::Plan plan = planner.next(engine, fused(12, 5));
    schedule::validate(plan, schedule::PlanMode::kFused);
    return std::ranges::count_if(plan.backward_stages(), [](const schedule::Range& stage) { return stage.first > 0; });
  };
  const int64_t free = waiting(0);
  CHECK(free > 4);
  CHECK(waiting(11 * 5 * kOutputs) == free);  // as without a limit
  for (const int64_t stages : {4, 2, 1}) CHECK(waiting(stages * 5 * kOutputs) <= stages);
  CHECK(waiting(1) <= 2);
}

TEST_CASE(
    "model planner: layer by layer, each layer is recomputed from its own inputs, if the host has room for them") {
  constexpr int64_t kOutputs = 1000;
  const auto model = model_of(12);
  Engine engine(device::parse_devices("virtual:2"));
  PlanRequest request = fused(12, 5);
  request.recompute_grain = RecomputeGrain::kLayer;
  const auto longest = [&](int64_t room, bool measured) {
    ModelPlanner planner(*model);
    if (measured) {
      teach(planner, std::vector<double>(12, 10.0), kOutputs);
    } else {
      planner.set_bytes(std::vector<int64_t>(12, kOutputs), std::vector<int64_t>(12, kOutputs), 0);
    }
    planner.set_host_room(room);
    const schedule::Plan plan = planner.next(engine, request);
    schedule::validate(plan, schedule::PlanMode::kFused);
    int layers = 0;
    for (const schedule::Job& job : plan.jobs) {
      if (job.phase == Phase::kBackward) layers = std::max(layers, job.layers.size());
    }
    return layers;
  };
  for (const bool measured : {false, true}) {
    CHECK(longest(0, measured) == 1);
    CHECK(longest(11 * 5 * kOutputs, measured) == 1);
    CHECK(longest(3 * 5 * kOutputs, measured) > 1);
  }
}

TEST_CASE("model planner: devices share a trainable layer by whole groups, and a frozen one in any way") {
  const auto model = model_of(4);
  Engine engine(device::parse_devices("virtual:4"));
  ModelPlanner planner(*model);
  planner.set_asynchronous(false);
  teach(planner, {1, 1, 1, 20});
  const auto head_jobs = [&](const PlanRequest& request) {
    const schedule::Plan plan = planner.next(engine, request);
    schedule::validate(plan, schedule::PlanMode::kFused);
    std::vector<schedule::Range> ranges;
    for (const schedule::Job& job : plan.jobs) {
      if (job.phase == Phase::kFused) ranges.push_back(job.microbatches);
    }
    return ranges;
  };
  CHECK((head_jobs(fused(4, 7)) == std::vector<schedule::Range>{{0, 7}}));
  const schedule::GradientGroups groups(7, 3);
  const std::vector<schedule::Range> shared = head_jobs(fused(4, 7, 3));
  CHECK(shared.size() > 1);
  for (const schedule::Range& range : shared) CHECK(groups.are_whole(range));
  PlanRequest frozen_head = fused(4, 7);
  frozen_head.trained.back() = 0;
  CHECK(head_jobs(frozen_head).size() > 1);
}

TEST_CASE("model planner: steps overlap while batches come early, and no longer") {
  const auto model = model_of(12);
  Engine engine(device::parse_devices("virtual:4"));
  ModelPlanner planner(*model);
  teach(planner, {10, 50, 10, 20, 10, 40, 10, 10, 30, 10, 20, 90});
  const auto next = [&] { return planner.next(engine, fused(12, 3)); };
  const auto note = [&](bool early) {
    for (int call = 0; call < 10; ++call) planner.note_submission(early);
  };
  CHECK(!overlaps(next()));
  note(true);
  for (int call = 0; call < 7; ++call) CHECK(!overlaps(next()));  // not before eight calls
  const schedule::Plan early = next();
  CHECK(overlaps(early));
  CHECK(planner.cut_of(early)->interleave > 1);
  note(false);
  for (int call = 0; call < 8; ++call) next();
  CHECK(!overlaps(next()));
  // A synchronous step never overlaps another.
  note(true);
  planner.set_asynchronous(false);
  CHECK(!overlaps(next()));
}

TEST_CASE("model planner: plans anew when links turn out slower, as for a machine that was described so") {
  const auto model = model_of(8);
  for (const double gb_per_s : {0.5e-6, 0.1e-6}) {
    Engine engine(device::parse_devices("virtual:2"));
    ModelPlanner planner(*model);
    teach(planner, {3, 3, 3, 3, 3, 3, 3, 5});
    const auto next = [&] { return planner.next(engine, fused(8, 4)); };
    next();
    const int64_t weight_bytes = planner.costs().front().weight_bytes;
    // A layer's weights take a known time up, whatever their size.
    const double rate = gb_per_s * static_cast<double>(weight_bytes);
    move(engine, rate);
    const MeasuredMachine machine = planner.machine(engine);
    CHECK(machine.cluster.link_up_gb_per_s == doctest::Approx(rate).epsilon(0.01));
    CHECK(machine.cluster.link_down_gb_per_s == doctest::Approx(rate).epsilon(0.01));
    for (int call = 0; call < 7; ++call) next();
    const schedule::Plan plan = next();
    schedule::SearchOptions options;
    options.plan.microbatches = 4;
    options.plan.gradient_groups = 1;
    options.interleave = false;
    options.max_fused_layers = 8;
    simulate::LinkRules rules;
    schedule::Cluster cluster;
    cluster.devices.resize(2);
    cluster.link_up_gb_per_s = cluster.link_down_gb_per_s = rate;
    const schedule::LayerCosts costs = planner.costs();
    const auto step_ms = [&](const schedule::Plan& recipe) {
      const auto plans = simulate::place_over_links(recipe, costs, cluster, rules, 97);
      return simulate::simulate_links(plans, costs, cluster, rules).timeline.steady_step_ms;
    };
    const schedule::Plan best = simulate::search_links(costs, cluster, options, rules).front().recipe;
    CHECK(step_ms(plan) <= 1.003 * step_ms(best));
  }
}

TEST_CASE("model planner: between gradient groups, longer stages where they are allowed and fit") {
  const auto model = model_of(8);
  Engine engine(device::parse_devices("virtual:2"));
  const auto fused_layers = [&](int groups, bool allowed, bool fits) {
    ModelPlanner planner(*model);
    planner.set_bytes(std::vector<int64_t>(8, 100'000), std::vector<int64_t>(8, 100), /*most_stage_bytes=*/300'000);
    if (allowed) planner.allow_longer({8, 10'000'000});
    planner.keep_within([&](const std::vector<schedule::Plan>& steps) {
      CHECK(steps.size() == kPredictedSteps);
      return fits || steps.front().backward_stages().front().size() <= 2;
    });
    teach(planner, {3, 3, 3, 3, 3, 3, 3, 3});
    return planner.next(engine, fused(8, 4, groups)).backward_stages().front().size();
  };
  // Without recompute, each device does half of the groups.
  CHECK(fused_layers(4, true, true) == 8);
  CHECK(fused_layers(4, true, false) <= 2);
  CHECK(fused_layers(4, false, true) <= 2);
  CHECK(fused_layers(1, true, true) <= 2);
}

TEST_CASE("model planner: searches on from the plan in use, and keeps it unless it finds a better one") {
  const auto model = model_of(12);
  Engine engine(device::parse_devices("virtual:4"));
  int changed = 0;
  std::vector<std::vector<double>> models = {{7, 3, 9, 4, 8, 5, 1, 9, 2, 6, 3, 5},
                                             {10, 50, 10, 20, 10, 40, 10, 10, 30, 10, 20, 90},
                                             {3, 7, 4, 6, 5, 5, 8, 2, 9, 1, 4, 9}};
  models.resize(static_cast<size_t>(rounds(1, 3)));
  for (const std::vector<double>& forward_ms : models) {
    ModelPlanner planner(*model);
    planner.set_asynchronous(false);
    teach(planner, forward_ms);
    const auto step_ms = [&](const schedule::Cut& cut) {
      const schedule::CostSums sums(planner.costs());
      schedule::PlannerOptions options;
      options.microbatches = 5;
      schedule::Cluster cluster;
      cluster.devices.resize(4);
      schedule::TimingRules rules;
      rules.asynchronous = false;
      rules.hop_on_same_device = true;
      return schedule::rate(schedule::to_recipe(cut, sums, 4, options), planner.costs(), cluster, rules, 1).step_ms;
    };
    schedule::Cut in_use;
    for (int call = 0; call < 20; ++call) {
      const schedule::Cut cut = *planner.cut_of(planner.next(engine, fused(12, 5)));
      if (call > 0 && cut != in_use) {
        ++changed;
        CHECK(call % 4 == 0);
        CHECK(call <= 12);
        CHECK(step_ms(cut) < step_ms(in_use) * 1.0011);
      }
      in_use = cut;
    }
  }
  CHECK(changed > 0);
}

TEST_CASE("model planner: knows how the devices' links cut and order transfers") {
  const auto model = model_of(4);
  const auto machine_of = [&](const std::string& devices) {
    Engine engine(device::parse_devices(devices));
    return ModelPlanner(*model).machine(engine);
  };
  CHECK(machine_of("virtual:2").chunk_bytes == device::LinkOptions{}.chunk_bytes);
  CHECK(machine_of("virtual:2").priorities);
  CHECK(machine_of("virtual:2,chunk=1MB").chunk_bytes == 1'000'000);
  CHECK(machine_of("virtual:2,chunk=0B").chunk_bytes == 0);
  CHECK(!machine_of("virtual:2,fifo").priorities);
}

TEST_CASE("model planner: bytes that are held count for the limit of stages, and travel as they are") {
  const auto model = model_of(8);
  Engine engine(device::parse_devices("virtual:2"));
  ModelPlanner planner(*model);
  teach(planner, {1, 1, 1, 1, 1, 1, 1, 1});
  const schedule::LayerCost cost = planner.costs().front();
  const int64_t held_bytes = cost.weight_bytes + cost.gradient_bytes + 1000;
  planner.set_bytes(std::vector<int64_t>(8, 1000), std::vector<int64_t>(8, 10), 2 * held_bytes);
  CHECK(planner.costs().front().weight_bytes == cost.weight_bytes);
  CHECK(planner.costs().front().gradient_bytes == cost.gradient_bytes);
  for (const bool asynchronous : {true, false}) {
    planner.set_asynchronous(asynchronous);
    // Values between stages may be larger than what a stage holds.
    planner.set_bytes(std::vector<int64_t>(8, 1000), std::vector<int64_t>(8, asynchronous ? 10 : 100 * held_bytes),
                      2 * held_bytes);
    const schedule::Plan plan = planner.next(engine, fused(8, 4));
    schedule::validate(plan, schedule::PlanMode::kFused);
    for (const schedule::Job& job : plan.jobs) CHECK(job.layers.size() <= 2);
  }
}

TEST_CASE("model planner: small devices get what fits them") {
  const auto model = model_of(8);
  const int64_t layer_bytes = lay_out_stage(*model, 0, 1).size_bytes;
  Engine engine(device::parse_devices(
      concat("virtual:1,memory=", 6 * layer_bytes, "B,virtual:1,memory=", 60 * layer_bytes, "B")));
  ModelPlanner planner(*model);
  teach(planner, {1, 1, 1, 1, 1, 1, 1, 1});
  const schedule::Plan plan = planner.next(engine, fused(8, 4));
  schedule::validate(plan, schedule::PlanMode::kFused);
  for (const schedule::Job& job : plan.jobs) {
    if (job.phase == Phase::kForward) CHECK(job.layers.size() == 1);
  }
}

TEST_CASE("model planner: the steps of training calls are kept, with the time that devices worked") {
  const auto model = model_of(2);
  ModelPlanner planner(*model);
  ExecutionLog evaluation, training;
  evaluation.add(ExecutionRecord{Phase::kForward, {0, 2}, 0, 0, 5, 7});
  training.add(ExecutionRecord{Phase::kForward, {0, 1}, 0, 0, 10, 12});
  training.add(ExecutionRecord{Phase::kFused, {1, 2}, 1, 1, 12, 20, 14, 3});
  planner.observe(evaluation);
  planner.observe(training);
  REQUIRE(planner.steps().size() == 1);
  CHECK(planner.steps().front().microbatches == 2);
  CHECK(planner.steps().front().start_ms == 10);
  CHECK(planner.steps().front().end_ms == 20);
  CHECK(planner.steps().front().busy_ms == 7);
  CHECK(!planner.knows_costs());
}

TEST_CASE("model planner: more microbatches shorten a synchronous step, down to the work") {
  const auto model = model_of(8);
  Engine engine(device::parse_devices("virtual:4"));
  ModelPlanner planner(*model);
  planner.set_asynchronous(false);
  teach(planner, {1, 1, 1, 1, 1, 1, 1, 1});
  const double one = planner.predicted_ms(engine, 1, 1, 1), four = planner.predicted_ms(engine, 4, 1, 0.25),
               many = planner.predicted_ms(engine, 32, 1, 1.0 / 32);
  CHECK(four < one);
  CHECK(many < four);
  CHECK(many >= 8 * 3 / 4.0);  // forward and backward without any recompute, on four devices
}

}  // namespace model_planner_test
