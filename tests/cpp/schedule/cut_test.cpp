#include <roundpipe/schedule/cut.h>

#include <algorithm>
#include <random>
#include <vector>

#include <doctest/doctest.h>

using namespace roundpipe::schedule;

TEST_CASE("cut: backward stages of several layers become single layers, a fused one stays") {
  Cut cut{{{{0, 3}, 1}, {{3, 4}, 2}}, {{{4, 6}, 1}, {{2, 4}, 2}, {{0, 2}, 1}}, 1.25};
  const Cut fused = with_single_backward_layers(cut, PlanMode::kFused);
  CHECK(to_string(fused) == "forward 1x3 1x1*2 | backward 1x2 2x1*2 2x1 | interleave 1.25");
  CHECK((fused.backward.back().layers == Range{0, 1}));
  cut.forward.push_back({{4, 6}, 1});
  const Cut all = with_single_backward_layers(cut, PlanMode::kTrain);
  CHECK(to_string(all) == "forward 1x3 1x1*2 1x2 | backward 2x1 2x1*2 2x1 | interleave 1.25");
}

TEST_CASE("partition table: the least sum of squares under a cap, against every partition") {
  std::mt19937 random(5);
  for (int round = 0; round < 300; ++round) {
    const int layers = 1 + static_cast<int>(random() % 9);
    LayerCosts costs;
    for (int layer = 0; layer < layers; ++layer)
      costs.push_back({.forward_ms = 1.0 + static_cast<double>(random() % 50),
                       .weight_bytes = 1 + static_cast<std::int64_t>(random() % 5)});
    const CostSums sums(costs);
    const std::int64_t room = random() % 2 ? 0 : 10 + static_cast<std::int64_t>(random() % 30);
    PartitionTable table = partitions_of(sums, {0, layers}, false, room);
    for (int stages = layers; stages >= 1; --stages) {
      double least = 1e300;
      for (unsigned cuts = 0; cuts < (1U << (layers - 1)); ++cuts) {
        std::vector<Range> candidate{{0, 1}};
        for (int layer = 1; layer < layers; ++layer) {
          if ((cuts >> (layer - 1)) & 1U) candidate.push_back({layer, layer});
          ++candidate.back().last;
        }
        if (static_cast<int>(candidate.size()) != stages) continue;
        double total = 0;
        for (const Range& stage : candidate) {
          if (room > 0 && stage.size() > 1 && sums.visit_bytes(stage, false) > room) total = 1e300;
          total += sums.forward_ms(stage) * sums.forward_ms(stage);
        }
        least = std::min(least, total);
      }
      const std::vector<Range> found = table.cut(stages);
      REQUIRE(found.empty() == (least >= 1e300));
      if (found.empty()) continue;
      double total = 0;
      int at = 0;
      for (const Range& stage : found) {
        REQUIRE(stage.first == at);
        at = stage.last;
        total += sums.forward_ms(stage) * sums.forward_ms(stage);
      }
      REQUIRE(at == layers);
      REQUIRE(total == doctest::Approx(least));
    }
  }
}

TEST_CASE("cut: recipe, order and traffic") {
  const LayerCosts costs(4, {.forward_ms = 1, .backward_ms = 2, .weight_bytes = 10});
  const CostSums sums(costs);
  PlannerOptions options;
  options.microbatches = 5;
  Cut cut;
  cut.forward = {{{0, 1}, 2}, {{1, 3}, 1}};
  cut.backward = {{{3, 4}, 1}, {{0, 3}, 1}};
  cut.interleave = 1.5;
  const Plan plan = to_recipe(cut, sums, 2, options);
  REQUIRE(plan.jobs.size() == 5);
  CHECK(plan.jobs[0].microbatches == Range{0, 2});
  CHECK(plan.jobs[1].microbatches == Range{2, 5});
  CHECK(plan.jobs[1].order == 0);
  // Work of a step: 5 microbatches of 3 * 1 forward, 3 fused and 3 * 3 backward.
  CHECK(plan.jobs[2].order == doctest::Approx(1.5 * 1 / 15));
  CHECK(plan.jobs[4].order == doctest::Approx(1.5 * 6 / 15));
  CHECK(traffic_ratio(plan, sums) == doctest::Approx((2 * 1 + 2 + 3) / 6.0));
  CHECK(to_string(cut) == "forward 1x1*2 1x2 | backward 1x1 1x3 | interleave 1.50");
}

TEST_CASE("cut: replicas with gradients cover whole groups of microbatches, others cut anywhere") {
  LayerCosts costs(4, {.forward_ms = 1, .backward_ms = 2, .weight_bytes = 10, .gradient_bytes = 10});
  costs[0].trained = costs[1].trained = false;
  Cut cut;
  cut.forward = {{{0, 3}, 2}};
  cut.backward = {{{3, 4}, 2}, {{2, 3}, 5}, {{1, 2}, 5}, {{0, 1}, 1}};
  const auto ranges = [&](int groups, int microbatches, Range layers, Phase phase) {
    PlannerOptions options;
    options.microbatches = microbatches;
    options.gradient_groups = groups;
    std::vector<Range> found;
    for (const Job& job : to_recipe(cut, CostSums(costs), 2, options).jobs) {
      if (job.layers == layers && job.phase == phase) found.push_back(job.microbatches);
    }
    return found;
  };
  using Ranges = std::vector<Range>;
  // Seven microbatches in three groups: [0, 3), [3, 5), [5, 7). Two replicas take two groups and one.
  CHECK(ranges(3, 7, {3, 4}, Phase::kFused) == Ranges{{0, 5}, {5, 7}});
  CHECK(ranges(3, 7, {2, 3}, Phase::kBackward) == Ranges{{0, 3}, {3, 5}, {5, 7}});
  CHECK(ranges(3, 7, {1, 2}, Phase::kBackward) == Ranges{{0, 1}, {1, 2}, {2, 4}, {4, 5}, {5, 7}});
  CHECK(ranges(3, 7, {0, 3}, Phase::kForward) == Ranges{{0, 3}, {3, 7}});
  CHECK(ranges(1, 7, {2, 3}, Phase::kBackward) == Ranges{{0, 7}});
  CHECK(ranges(9, 2, {2, 3}, Phase::kBackward) == Ranges{{0, 1}, {1, 2}});
  CHECK(ranges(0, 7, {3, 4}, Phase::kFused) == Ranges{{0, 3}, {3, 7}});
}

TEST_CASE("cut: gradients below the first backward layer need no groups") {
  const LayerCosts costs(3, {.forward_ms = 1, .backward_ms = 2, .weight_bytes = 10, .gradient_bytes = 10});
  PlannerOptions options;
  options.microbatches = 6;
  options.gradient_groups = 2;
  options.first_backward_layer = 3;
  const CostSums frozen(costs, 3), trained(costs);
  CHECK(most_replicas({2, 3}, true, frozen, options) == 6);
  CHECK(most_replicas({2, 3}, true, trained, options) == 2);
  CHECK(most_replicas({2, 3}, false, trained, options) == 6);
}

TEST_CASE("cut: greedy stages fill up to the threshold") {
  const LayerCosts costs(7, {.forward_ms = 1, .backward_ms = 2});
  PlannerOptions options;
  options.upper_threshold = 1;
  const Stages stages = greedy_stages(costs, 3, options);
  CHECK(stages.backward == std::vector<Range>{{5, 7}, {3, 5}, {1, 3}, {0, 1}});
  CHECK(stages.forward == std::vector<Range>{{0, 1}, {1, 2}, {2, 3}, {3, 4}, {4, 5}});
}
