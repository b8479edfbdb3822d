#include <roundpipe/simulate/simulator.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/schedule/planner.h>

using namespace roundpipe::schedule;
using namespace roundpipe::simulate;

namespace {

Cluster cluster_of(int devices, double hop_ms = 0) {
  Cluster cluster;
  cluster.devices.resize(static_cast<std::size_t>(devices));
  cluster.hop_latency_ms = hop_ms;
  return cluster;
}

const LayerCost kLayer{.forward_ms = 1, .backward_ms = 2};

// Forward of layer 0 on device 0, layer 1 fused on device 1, backward of layer 0 on the last device.
Plan two_plain_layers(int devices) {
  return {2,
          2,
          devices,
          0,
          {{Phase::kForward, {0, 1}, {0, 2}, 0},
           {Phase::kFused, {1, 2}, {0, 2}, 1},
           {Phase::kBackward, {0, 1}, {0, 2}, devices == 2 ? 0 : devices - 1}}};
}

std::vector<double> ends_of(const Timeline& timeline) {
  std::vector<double> ends;
  for (const TimelineEvent& event : timeline.events) ends.push_back(event.end_ms);
  return ends;
}

// A valid plan with random stages, replicas over random microbatch ranges, and random devices.
Plan random_plan(std::mt19937& random, PlanMode mode) {
  const auto up_to = [&](int n) { return 1 + static_cast<int>(random() % static_cast<unsigned>(n)); };
  Plan plan{up_to(7), up_to(6), up_to(4), 0, {}};
  const auto cut = [&](int first, int last) {
    std::vector<Range> pieces;
    while (first < last) {
      const int size = up_to(last - first);
      pieces.push_back({first, first + size});
      first += size;
    }
    return pieces;
  };
  const auto add = [&](Phase phase, Range stage) {
    for (const Range& part : cut(0, plan.microbatches))
      plan.jobs.push_back({phase, stage, part, up_to(plan.devices) - 1});
  };
  plan.first_backward_layer = random() % 2 ? 0 : up_to(plan.layers + 1) - 1;
  std::vector<Range> backward;
  if (mode != PlanMode::kInference) backward = cut(std::min(plan.first_backward_layer, plan.layers - 1), plan.layers);
  std::ranges::reverse(backward);
  if (mode == PlanMode::kTrain && plan.first_backward_layer == plan.layers) backward.clear();
  for (const Range& stage : cut(0, mode == PlanMode::kFused ? backward.front().first : plan.layers))
    add(Phase::kForward, stage);
  for (std::size_t i = 0; i < backward.size(); ++i)
    add(mode == PlanMode::kFused && i == 0 ? Phase::kFused : Phase::kBackward, backward[i]);
  return plan;
}

// The slow way: raises every event's start until all pairwise constraints hold, each written out.
std::vector<double> relaxed_ends(const Plan& plan, const LayerCosts& costs, const Cluster& cluster,
                                 const SimulateOptions& options) {
  struct Node {
    int step, job, m;
    double recompute, rest, start;
    double end() const { return start + recompute + rest; }
  };
  const bool train = mode_of(plan) == PlanMode::kTrain;
  std::vector<Node> nodes;
  for (int step = 0; step < options.steps; ++step) {
    for (int j = 0; j < static_cast<int>(plan.jobs.size()); ++j) {
      const Job& job = plan.jobs[static_cast<std::size_t>(j)];
      double forward = 0, backward = 0;
      for (int l = job.layers.first; l < job.layers.last; ++l) {
        forward += costs[static_cast<std::size_t>(l)].forward_ms;
        if (l >= plan.first_backward_layer) backward += costs[static_cast<std::size_t>(l)].backward_ms;
      }
      const double speed = cluster.devices[static_cast<std::size_t>(job.device)].speed;
      for (int m = job.microbatches.first; m < job.microbatches.last; ++m) {
        if (job.phase == Phase::kForward) nodes.push_back({step, j, m, 0, forward / speed, 0});
        if (job.phase == Phase::kFused) nodes.push_back({step, j, m, 0, (forward + backward) / speed, 0});
        if (job.phase == Phase::kBackward) nodes.push_back({step, j, m, forward / speed, backward / speed, 0});
      }
    }
  }
  for (bool changed = true; changed;) {
    changed = false;
    for (std::size_t b = 0; b < nodes.size(); ++b) {
      Node& to = nodes[b];
      const Job& job = plan.jobs[static_cast<std::size_t>(to.job)];
      const bool backward = job.phase == Phase::kBackward;
      double start = to.start;
      for (std::size_t a = 0; a < nodes.size(); ++a) {
        const Node& from = nodes[a];
        const Job& other = plan.jobs[static_cast<std::size_t>(from.job)];
        const bool makes_output = other.phase != Phase::kBackward;
        const bool makes_gradient = other.phase != Phase::kForward;
        const double hop = other.device == job.device ? 0 : cluster.hop_latency_ms;
        if (a < b && other.device == job.device) start = std::max(start, from.end());
        if (from.step == to.step && from.m == to.m) {
          if (makes_output && job.layers.first > 0 && other.layers.contains(job.layers.first - 1))
            start = std::max(start, from.end() + hop);
          if (backward && makes_gradient && other.layers.contains(job.layers.last))
            start = std::max(start, from.end() + hop - to.recompute);
        }
        if (from.step == to.step && train && backward && makes_output && other.layers.last == plan.layers) {
          start = std::max(start, from.end());
          if (job.layers.last == plan.layers)
            start = std::max(start, from.end() + cluster.hop_latency_ms - to.recompute);
        }
        if (from.step == to.step - (options.rules.asynchronous ? 2 : 1) && !backward && makes_gradient) {
          const int low = std::max({job.layers.first, other.layers.first, plan.first_backward_layer});
          if (low < std::min(job.layers.last, other.layers.last)) start = std::max(start, from.end());
        }
      }
      if (start > to.start) {
        to.start = start;
        changed = true;
      }
    }
  }
  std::vector<double> ends;
  for (const Node& node : nodes) ends.push_back(node.end());
  return ends;
}

}  // namespace

TEST_CASE("simulator: one device has no bubble") {
  const Plan plan{2, 2, 1, 0, {{Phase::kForward, {0, 2}, {0, 2}, 0}}};
  const LayerCosts costs{{.forward_ms = 1}, {.forward_ms = 2}};
  const Timeline timeline = simulate(plan, costs, cluster_of(1, 5));
  CHECK(ends_of(timeline) == std::vector<double>{3, 6});
  CHECK(timeline.makespan_ms == 6);
  CHECK(timeline.bubble == 0);
  CHECK(timeline.steady_step_ms == 6);
}

TEST_CASE("simulator: a hop and a slower device") {
  const Plan plan{2, 2, 2, 0, {{Phase::kForward, {0, 1}, {0, 2}, 0}, {Phase::kForward, {1, 2}, {0, 2}, 1}}};
  Cluster cluster = cluster_of(2, 0.5);
  Timeline timeline = simulate(plan, {kLayer, kLayer}, cluster);
  CHECK(ends_of(timeline) == std::vector<double>{1, 2, 2.5, 3.5});
  CHECK(timeline.bubble == doctest::Approx(1 - 4 / 7.0));
  cluster.devices[1].speed = 0.5;
  CHECK(ends_of(simulate(plan, {kLayer, kLayer}, cluster)) == std::vector<double>{1, 2, 3.5, 5.5});
  cluster.hop_latency_ms = 0;
  timeline = simulate(plan, {kLayer, kLayer}, cluster);
  CHECK(ends_of(timeline) == std::vector<double>{1, 2, 3, 5});
}

TEST_CASE("simulator: fused, and recompute before the gradient arrives") {
  const Plan plan = two_plain_layers(2);
  const Timeline timeline = simulate(plan, {kLayer, kLayer}, cluster_of(2));
  CHECK(ends_of(timeline) == std::vector<double>{1, 2, 4, 7, 6, 9});
  CHECK(timeline.events[4].start_ms == 3);
  CHECK(timeline.events[4].recompute_ms == 1);
  CHECK(timeline.bubble == doctest::Approx(1 - 14 / 18.0));
}

TEST_CASE("simulator: synchronous and asynchronous steps") {
  const Plan plan = two_plain_layers(3);
  const Timeline one = simulate(plan, {kLayer, kLayer}, cluster_of(3));
  CHECK(one.makespan_ms == 9);

  const Timeline sync = simulate(plan, {kLayer, kLayer}, cluster_of(3), {4, {.asynchronous = false}});
  CHECK(sync.makespan_ms == 36);
  CHECK(sync.steady_step_ms == 9);
  CHECK(sync.steady_bubble == doctest::Approx(1 - 14 / 27.0));
  check(sync, plan, {.asynchronous = false});

  const Timeline async = simulate(plan, {kLayer, kLayer}, cluster_of(3), {.steps = 3});
  // Step 1 starts at once; step 2 waits for step 0's gradient of layer 0, which lands at 9.
  const std::vector<double> expected{1, 2, 4, 7, 6, 9, 3, 4, 10, 13, 12, 15, 10, 11, 16, 19, 18, 21};
  CHECK(ends_of(async) == expected);
  CHECK(async.steady_step_ms == 6);
  check(async, plan);
  CHECK_THROWS_WITH_AS(check(async, plan, {.asynchronous = false}), doctest::Contains("before its weights"),
                       std::logic_error);
}

TEST_CASE("simulator: a loss outside needs every output") {
  const Plan plan{1, 2, 1, 0, {{Phase::kForward, {0, 1}, {0, 2}, 0}, {Phase::kBackward, {0, 1}, {0, 2}, 0}}};
  CHECK(ends_of(simulate(plan, {kLayer}, cluster_of(1, 0.5))) == std::vector<double>{1, 2, 5, 8});
  CHECK(ends_of(simulate(plan, {kLayer}, cluster_of(1, 3))) == std::vector<double>{1, 2, 7, 10});
}

TEST_CASE("simulator: frozen layers cost no backward and wait for no update") {
  Plan plan = two_plain_layers(2);
  plan.first_backward_layer = 1;
  plan.jobs.pop_back();
  const Timeline timeline = simulate(plan, {kLayer, kLayer}, cluster_of(2), {2, {.asynchronous = false}});
  CHECK(ends_of(timeline) == std::vector<double>{1, 2, 4, 7, 3, 4, 10, 13});
  plan.first_backward_layer = 2;
  CHECK(ends_of(simulate(plan, {kLayer, kLayer}, cluster_of(2))) == std::vector<double>{1, 2, 2, 3});
}

TEST_CASE("simulator: agrees with slow relaxation on random plans") {
  std::mt19937 random(4);
  for (int round = 0; round < 600; ++round) {
    const PlanMode mode = std::vector{PlanMode::kInference, PlanMode::kTrain, PlanMode::kFused}[random() % 3];
    const Plan plan = random_plan(random, mode);
    REQUIRE_NOTHROW(validate(plan, mode));
    LayerCosts costs;
    for (int layer = 0; layer < plan.layers; ++layer)
      costs.push_back({static_cast<double>(random() % 8) / 4, static_cast<double>(random() % 16) / 4});
    Cluster cluster = cluster_of(plan.devices, static_cast<double>(random() % 4) / 2);
    for (ClusterDevice& device : cluster.devices) device.speed = random() % 3 ? 1 : 2;
    const SimulateOptions options{1 + static_cast<int>(random() % 4), {.asynchronous = random() % 2 == 0}};

    const Timeline timeline = simulate(plan, costs, cluster, options);
    REQUIRE(ends_of(timeline) == relaxed_ends(plan, costs, cluster, options));
    REQUIRE_NOTHROW(check(timeline, plan, options.rules));
    REQUIRE(timeline.bubble > -1e-9);
    REQUIRE(timeline.bubble <= 1);
  }
}

TEST_CASE("simulator: planned models run, and one device is always busy") {
  const LayerCosts costs(24, kLayer);
  for (const PlanMode mode : {PlanMode::kInference, PlanMode::kTrain, PlanMode::kFused}) {
    for (int devices : {1, 2, 4, 8}) {
      const PlannerOptions options{.mode = mode, .microbatches = 16};
      const Plan plan = make_plan(choose_stages(costs, devices, options), 24, devices, options);
      const Timeline timeline = simulate(plan, costs, cluster_of(devices), {.steps = 6});
      check(timeline, plan);
      CHECK(timeline.bubble < 0.5);
      if (devices == 1) CHECK(timeline.bubble == doctest::Approx(0));
    }
  }
}

TEST_CASE("simulator: check finds what is wrong") {
  const Plan plan = two_plain_layers(3);
  const Timeline good = simulate(plan, {kLayer, kLayer}, cluster_of(3), {.steps = 3});
  const auto broken = [&](auto change, const char* text) {
    Timeline timeline = good;
    change(timeline);
    CHECK_THROWS_WITH_AS(check(timeline, plan), doctest::Contains(text), std::logic_error);
  };
  broken([](Timeline& t) { t.events.pop_back(); }, "expected a multiple");
  broken([](Timeline& t) { std::swap(t.events[0], t.events[1]); }, "next microbatch");
  broken([](Timeline& t) { t.events[2].device = 0; }, "next microbatch");
  broken([](Timeline& t) { t.events[1].start_ms = 0.5; }, "device is busy");
  broken([](Timeline& t) { t.events[2].start_ms = 0.5; }, "before its input");
  broken([](Timeline& t) { t.events[4].start_ms = 2.5; }, "before its gradient");
  broken([](Timeline& t) { t.events[12].start_ms = 8; }, "before its weights");
  broken([](Timeline& t) { t.events[0].end_ms = -1; }, "ends before");
  broken([](Timeline& t) { t.makespan_ms = 1; }, "do not follow");
}

TEST_CASE("simulator: bad arguments are named") {
  const Plan plan = two_plain_layers(2);
  const LayerCosts costs{kLayer, kLayer};
  using doctest::Contains;
  CHECK_THROWS_WITH_AS(simulate(plan, {kLayer}, cluster_of(2)), Contains("costs has 1 layers"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(simulate(plan, costs, cluster_of(3)), Contains("cluster has 3 devices"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(simulate(plan, costs, cluster_of(2), {.steps = 0}), Contains("steps is 0"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(simulate(plan, costs, cluster_of(2, -1)), Contains("hop_latency_ms"), std::invalid_argument);
  CHECK_THROWS_AS(simulate(Plan{}, costs, cluster_of(2)), std::invalid_argument);
}
