#include <roundpipe/simulate/link_simulator.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/schedule/search.h>

using namespace roundpipe::schedule;
using namespace roundpipe::simulate;

namespace {

Cluster cluster_of(int devices, double gb_per_s = 0) {
  Cluster cluster;
  cluster.devices.resize(static_cast<std::size_t>(devices));
  cluster.link_up_gb_per_s = cluster.link_down_gb_per_s = gb_per_s;
  return cluster;
}

constexpr std::int64_t kMB = 1'000'000;

// Two layers on one device: forward of the first, the second fused, backward of the first.
Plan two_layers(int microbatches, int devices = 1) {
  const Range all{0, microbatches};
  return {2,
          microbatches,
          devices,
          0,
          {{Phase::kForward, {0, 1}, all, 0},
           {Phase::kFused, {1, 2}, all, devices > 1 ? 1 : 0},
           {Phase::kBackward, {0, 1}, all, 0}}};
}

LayerCosts costs_of(std::int64_t weight_bytes, std::int64_t activation_bytes) {
  return LayerCosts(2, {.forward_ms = 10,
                        .backward_ms = 20,
                        .weight_bytes = weight_bytes,
                        .gradient_bytes = weight_bytes,
                        .activation_bytes = activation_bytes});
}

}  // namespace

TEST_CASE("links: transfers end, however late it is") {
  // At 1e12 ms, a clock cannot tell less than some thousand bytes of such a link.
  LayerCosts costs = costs_of(1'234'567, 89'123);
  for (LayerCost& cost : costs) cost.forward_ms = 1e11 / 3;
  const std::vector<Plan> plans(6, two_layers(3));
  const LinkTimeline got = simulate_links(plans, costs, cluster_of(1, 25), {});
  CHECK(got.timeline.makespan_ms == doctest::Approx(6 * 3 * 1e11));
}

TEST_CASE("links: with infinite bandwidth every event ends as without links") {
  std::mt19937 random(21);
  for (int round = 0; round < 60; ++round) {
    LayerCosts costs;
    const int layers = 2 + static_cast<int>(random() % 12);
    for (int layer = 0; layer < layers; ++layer) {
      const double ms = 1 + static_cast<double>(random() % 100) / 10;
      costs.push_back({.forward_ms = ms,
                       .backward_ms = 2 * ms,
                       .weight_bytes = kMB,
                       .gradient_bytes = kMB,
                       .activation_bytes = kMB});
    }
    const Cluster cluster = cluster_of(1 + static_cast<int>(random() % 5));
    SearchOptions options;
    options.plan.microbatches = 1 + static_cast<int>(random() % 6);
    options.plan.mode = std::vector{PlanMode::kInference, PlanMode::kTrain, PlanMode::kFused}[random() % 3];
    options.rules.asynchronous = random() % 2 == 0;
    options.effort = 20'000;
    Placer placer(search(costs, cluster, options).front().recipe, costs, cluster, options.rules);
    std::vector<Plan> plans;
    for (int step = 0; step < 4; ++step) plans.push_back(placer.next());
    const Timeline expected = simulate(plans, costs, cluster, options.rules);
    const LinkTimeline got = simulate_links(plans, costs, cluster, {.timing = options.rules});
    REQUIRE(got.timeline.events.size() == expected.events.size());
    for (std::size_t i = 0; i < expected.events.size(); ++i)
      REQUIRE(got.timeline.events[i].end_ms == doctest::Approx(expected.events[i].end_ms));
    check(got.timeline, plans, options.rules);
  }
}

TEST_CASE("links: weights come first, the next job's while one runs, gradients go down in the end") {
  // 5 ms for a transfer of weights; values take no time.
  const std::vector<Plan> plans{two_layers(1)};
  const LinkTimeline got = simulate_links(plans, costs_of(5 * kMB, 0), cluster_of(1, 1), {});
  std::vector<double> ends;
  for (const TimelineEvent& event : got.timeline.events) ends.push_back(event.end_ms);
  // The first job's value is uploaded after the chunk of the third job's weights that began at 15 ms.
  for (std::size_t i = 0; i < 3; ++i) CHECK(ends[i] == doctest::Approx(std::vector<double>{15, 50, 80}[i]));
  CHECK(got.landed_ms == doctest::Approx(85));
}

TEST_CASE("links: values hop through the host") {
  // 2 ms up and 2 ms down for the value and for its gradient.
  const std::vector<Plan> plans{two_layers(1, 2)};
  const LinkTimeline got = simulate_links(plans, costs_of(0, 2 * kMB), cluster_of(2, 1), {});
  std::vector<double> ends;
  for (const TimelineEvent& event : got.timeline.events) ends.push_back(event.end_ms);
  // The recompute waits for nothing, the rest of the backward for the gradient.
  for (std::size_t i = 0; i < 3; ++i) CHECK(ends[i] == doctest::Approx(std::vector<double>{10, 44, 68}[i]));
}

TEST_CASE("links: all together stay within the host's bandwidth") {
  Cluster cluster = cluster_of(2, 10);
  cluster.host_gb_per_s = 10;
  Plan plan{2, 2, 2, 0, {{Phase::kForward, {0, 2}, {0, 1}, 0}, {Phase::kForward, {0, 2}, {1, 2}, 1}}};
  const LinkTimeline got = simulate_links(std::vector<Plan>{plan}, costs_of(50 * kMB, 0), cluster, {});
  // 50 MB for each of two devices over 10 GB/s: 10 ms; 10 ms of work, in which the second layer's arrive, and 10 more.
  for (const TimelineEvent& event : got.timeline.events) CHECK(event.end_ms == doctest::Approx(30));
}

TEST_CASE("links: a job begins with its first layer's weights, and gradients leave layer by layer") {
  // 16 ms for the weights of each layer or for its gradient, 10 ms forward, 20 ms backward.
  const Plan plan{2, 2, 1, 0, {{Phase::kFused, {0, 2}, {0, 2}, 0}}};
  const LinkTimeline got = simulate_links(std::vector<Plan>{plan}, costs_of(16 * kMB, 0), cluster_of(1, 1), {});
  // The second layer's weights arrive at 32 ms, when the first microbatch has waited for 6.
  CHECK(got.timeline.events[0].end_ms == doctest::Approx(32 + 10 + 40));
  CHECK(got.timeline.events[1].end_ms == doctest::Approx(82 + 60));
  // The last layer's gradient leaves after half of the last backward, the first one's at its end.
  std::vector<double> starts;
  for (const TransferEvent& event : got.transfers) {
    if (event.kind == Priority::kParameterGradient) starts.push_back(event.start_ms);
  }
  CHECK(starts == std::vector<double>{122, 142});
  CHECK(got.landed_ms == doctest::Approx(142 + 16));
}

TEST_CASE("links: a value waits for one chunk, not for all weights; first come first served it does") {
  // The second job's weights are being uploaded when the first job needs its second value.
  LayerCosts costs = costs_of(0, 1 * kMB);
  costs.push_back({.forward_ms = 10, .backward_ms = 20, .weight_bytes = 400 * kMB, .activation_bytes = 0});
  Plan plan{3,
            2,
            2,
            0,
            {{Phase::kForward, {0, 1}, {0, 2}, 0},
             {Phase::kForward, {1, 2}, {0, 2}, 1},
             {Phase::kForward, {2, 3}, {0, 2}, 1}}};
  const auto second_value_ms = [&](bool priorities) {
    LinkRules rules;
    rules.chunk_bytes = 10 * kMB;
    rules.priorities = priorities;
    return simulate_links(std::vector<Plan>{plan}, costs, cluster_of(2, 1), rules).timeline.events[3].end_ms;
  };
  CHECK(second_value_ms(true) < 60);
  CHECK(second_value_ms(false) > 400);
}

TEST_CASE("links: a synchronous step waits for the updates of its layers") {
  LinkRules rules;
  rules.timing.asynchronous = false;
  const std::vector<Plan> plans(2, two_layers(1));
  const LayerCosts costs = costs_of(0, 0);
  CHECK(simulate_links(plans, costs, cluster_of(1), rules).timeline.events[3].start_ms == doctest::Approx(70));
  LayerCosts trained = costs_of(30 * kMB, 0);
  rules.update.gb_per_s = 1;
  // Layer 1 is updated from 40 to 70 ms, layer 0 from 70 to 100 ms: each gates its own forward.
  const Timeline timeline = simulate_links(plans, trained, cluster_of(1), rules).timeline;
  CHECK(timeline.events[3].start_ms == doctest::Approx(100));
}

TEST_CASE("links: an update and a link share the host's memory") {
  // One layer of 60 MB: its job takes 10 ms, then 60 MB of gradients go down, and its update moves 13 x 60 MB.
  const auto landed_ms = [](double host, double link, UpdateRate update) {
    const Plan plan{1, 1, 1, 0, {{Phase::kFused, {0, 1}, {0, 1}, 0}}};
    const LayerCosts costs{{.forward_ms = 4, .backward_ms = 6, .weight_bytes = 60 * kMB, .gradient_bytes = 60 * kMB}};
    Cluster cluster = cluster_of(1, link);
    cluster.host_gb_per_s = host;
    return simulate_links(std::vector<Plan>{plan}, costs, cluster, {.update = update}).landed_ms;
  };
  // Nothing else moves meanwhile: up 1, down 1, and 13 ms.
  CHECK(landed_ms(60, 0, {.traffic = 13}) == doctest::Approx(10 + 1 + 1 + 13));
  // The link is slower than the memory.
  CHECK(landed_ms(60, 30, {.traffic = 13}) == doctest::Approx(10 + 2 + 2 + 13));
  // So is the optimizer: 20 ms at 3 GB/s of weights, which are 39 of the 60.
  CHECK(landed_ms(60, 30, {.gb_per_s = 3, .traffic = 13}) == doctest::Approx(10 + 2 + 2 + 20));
  CHECK(landed_ms(60, 30, {.gb_per_s = 6, .traffic = 13}) == doctest::Approx(10 + 2 + 2 + 13));
  // Without a limit of the memory, as if updates had no traffic.
  CHECK(landed_ms(0, 30, {.gb_per_s = 3, .traffic = 13}) == landed_ms(0, 30, {.gb_per_s = 3}));
}

TEST_CASE("links: an update slows the links beside it, which leave it what they cannot use") {
  // Two steps of one layer without compute; the second reads the weights of before the first one's update.
  const auto ends_ms = [](double link) {
    const std::vector<Plan> plans(2, Plan{1, 1, 1, 0, {{Phase::kFused, {0, 1}, {0, 1}, 0}}});
    const LayerCosts costs{{.weight_bytes = 30 * kMB, .gradient_bytes = 30 * kMB}};
    Cluster cluster = cluster_of(1, link);
    cluster.host_gb_per_s = 30;
    const LinkTimeline got = simulate_links(plans, costs, cluster, {.update = {.traffic = 4}});
    std::vector<double> ends;
    for (const TransferEvent& event : got.transfers) ends.push_back(event.end_ms);
    std::ranges::sort(ends);
    ends.push_back(got.landed_ms);
    return ends;
  };
  // Up 1. Then down and the next weights share: 2 ms. Then the first update shares with the second gradients: these
  // take 2 ms, in which 30 of the update's 120 MB move; it ends 3 ms later. The second update takes 4 ms.
  const std::vector<double> shared{1, 3, 3, 5, 12};
  // At 10 GB/s a link: up 3; both 3 more; the update gets 20 beside the gradients' 10: 60 MB in 3 ms, then 2 ms.
  const std::vector<double> slow{3, 6, 6, 9, 15};
  for (std::size_t i = 0; i < shared.size(); ++i) {
    CHECK(ends_ms(0)[i] == doctest::Approx(shared[i]));
    CHECK(ends_ms(10)[i] == doctest::Approx(slow[i]));
  }
}

TEST_CASE("links: frozen weights that a device keeps go up once") {
  LayerCosts costs = costs_of(5 * kMB, 0);
  for (LayerCost& cost : costs) {
    cost.gradient_bytes = kMB;
    cost.frozen_bytes = 4 * kMB;
  }
  const std::vector<Plan> plans(3, two_layers(1));
  const auto up_ms = [&](std::int64_t resident_bytes) {
    Cluster cluster = cluster_of(1, 1);
    cluster.devices[0].resident_bytes = resident_bytes;
    std::vector<double> of_steps(plans.size());
    for (const TransferEvent& event : simulate_links(plans, costs, cluster, {}).transfers) {
      if (event.kind == Priority::kWeight)
        of_steps[static_cast<std::size_t>(event.step)] += event.end_ms - event.start_ms;
    }
    return of_steps;
  };
  const auto check_steps = [&](const std::vector<double>& got, const std::vector<double>& expected) {
    for (std::size_t i = 0; i < expected.size(); ++i) CHECK(got[i] == doctest::Approx(expected[i]));
  };
  check_steps(up_ms(0), {15, 15, 15});
  check_steps(up_ms(8 * kMB), {11, 3, 3});  // the first layer is met twice in the first step
  check_steps(up_ms(4 * kMB), {11, 7, 7});  // room for one: the first layer's
}

TEST_CASE("links: bad rules") {
  const std::vector<Plan> several{two_layers(1)};
  CHECK_THROWS_AS(simulate_links(several, costs_of(0, 0), cluster_of(1), {.update = {.gb_per_s = -1}}),
                  std::invalid_argument);
  CHECK_THROWS_AS(simulate_links(several, costs_of(0, 0), cluster_of(1), {.update = {.traffic = -1}}),
                  std::invalid_argument);
  const std::vector<Plan> plans{two_layers(1)};
  CHECK_THROWS_AS(simulate_links(plans, costs_of(0, 0), cluster_of(1), {.prefetched_values = 0}),
                  std::invalid_argument);
  CHECK_THROWS_AS(simulate_links(std::vector<Plan>{}, costs_of(0, 0), cluster_of(1), {}), std::invalid_argument);
}
