#include <roundpipe/schedule/planner.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

using namespace roundpipe::schedule;

namespace {

LayerCosts random_costs(std::mt19937& random, int layers) {
  LayerCosts costs;
  for (int layer = 0; layer < layers; ++layer) {
    const double forward_ms = 0.1 + static_cast<double>(random() % 100) / 50;
    const auto bytes = static_cast<std::int64_t>(1 + random() % 50);
    costs.push_back({forward_ms, 2 * forward_ms, bytes, bytes, 1, 2 * bytes});
  }
  return costs;
}

std::int64_t device_bytes(const LayerCosts& costs, Range stage, bool backward) {
  std::int64_t sum = 0;
  for (int layer = stage.first; layer < stage.last; ++layer) {
    const LayerCost& cost = costs[static_cast<std::size_t>(layer)];
    sum += cost.weight_bytes + (backward ? cost.gradient_bytes + cost.saved_bytes : 0);
  }
  return sum;
}

}  // namespace

TEST_CASE("planner: random models, devices, microbatches and modes give valid plans") {
  std::mt19937 random(3);
  for (int round = 0; round < 3000; ++round) {
    const int layers = 1 + static_cast<int>(random() % 40);
    const int devices = 1 + static_cast<int>(random() % 16);
    const LayerCosts costs = random_costs(random, layers);
    PlannerOptions options;
    options.mode = std::vector{PlanMode::kInference, PlanMode::kTrain, PlanMode::kFused}[random() % 3];
    options.microbatches = 1 + static_cast<int>(random() % 64);
    options.min_stages = random() % 2 ? 0 : static_cast<int>(random() % 20);
    options.upper_threshold = 1 + static_cast<double>(random() % 5) / 10;
    options.max_stage_bytes = random() % 2 ? 0 : 200 + static_cast<std::int64_t>(random() % 300);
    options.first_backward_layer = random() % 2 ? 0 : static_cast<int>(random()) % (layers + 1);
    if (options.first_backward_layer < 0) options.first_backward_layer = 0;
    options.first_device = static_cast<int>(random() % static_cast<unsigned>(devices));

    const Stages stages = choose_stages(costs, devices, options);
    REQUIRE(stages == choose_stages(costs, devices, options));
    const Plan plan = make_plan(stages, layers, devices, options);
    REQUIRE_NOTHROW(validate(plan, options.mode));
    REQUIRE(plan.forward_stages() == stages.forward);
    REQUIRE(plan.backward_stages() == stages.backward);
    for (std::size_t i = 0; i < plan.jobs.size(); ++i) {
      REQUIRE(plan.jobs[i].device == (options.first_device + static_cast<int>(i)) % devices);
      REQUIRE(plan.jobs[i].microbatches == Range{0, options.microbatches});
    }

    const int min_stages = options.min_stages > 0 ? options.min_stages : devices;
    for (bool backward : {false, true}) {
      const std::vector<Range>& cut = backward ? stages.backward : stages.forward;
      double total = 0, largest_layer = 0, largest_stage = 0;
      int cut_layers = 0;
      for (const Range& stage : cut) {
        double sum = 0;
        for (int layer = stage.first; layer < stage.last; ++layer) {
          const LayerCost& cost = costs[static_cast<std::size_t>(layer)];
          const double time = cost.forward_ms + (backward ? cost.backward_ms : 0);
          sum += time;
          largest_layer = std::max(largest_layer, time);
        }
        total += sum;
        largest_stage = std::max(largest_stage, sum);
        cut_layers += stage.size();
        if (options.max_stage_bytes > 0) REQUIRE(device_bytes(costs, stage, backward) <= options.max_stage_bytes);
      }
      REQUIRE(static_cast<int>(cut.size()) >= std::min(min_stages, cut_layers));
      REQUIRE(largest_stage <= options.upper_threshold * std::max(largest_layer, total / min_stages) * (1 + 1e-6));
    }
  }
}

TEST_CASE("planner: uniform layers") {
  const LayerCosts costs(8, LayerCost{1, 2, 10, 10, 1, 1});
  PlannerOptions options{.mode = PlanMode::kFused, .microbatches = 4};
  Stages stages = choose_stages(costs, 4, options);
  CHECK(stages.backward == std::vector<Range>{{6, 8}, {4, 6}, {2, 4}, {0, 2}});
  // Two layers would cost 2 ms, above 1.1 * 6 / 4.
  CHECK(stages.forward.size() == 6);
  options.upper_threshold = 1.4;
  stages = choose_stages(costs, 4, options);
  CHECK(stages.forward == std::vector<Range>{{0, 1}, {1, 2}, {2, 4}, {4, 6}});
  Plan plan = make_plan(stages, 8, 4, options);
  CHECK(plan.jobs[4] == Job{Phase::kFused, {6, 8}, {0, 4}, 0});
  CHECK(plan.jobs.back() == Job{Phase::kBackward, {0, 2}, {0, 4}, 3});

  options.mode = PlanMode::kTrain;
  options.first_backward_layer = 4;
  stages = choose_stages(costs, 2, options);
  CHECK(stages.forward == std::vector<Range>{{0, 4}, {4, 8}});
  CHECK(stages.backward == std::vector<Range>{{6, 8}, {4, 6}});

  options.first_backward_layer = 8;
  CHECK(choose_stages(costs, 2, options).backward.empty());
  options.mode = PlanMode::kFused;
  options.min_stages = 1;
  stages = choose_stages(costs, 2, options);
  CHECK(stages.backward == std::vector<Range>{{7, 8}});

  options.first_backward_layer = 0;
  stages = choose_stages(costs, 1, options);
  CHECK(stages.forward.empty());
  CHECK(stages.backward == std::vector<Range>{{0, 8}});
}

TEST_CASE("planner: a heavy layer bounds the others, and caps split stages") {
  LayerCosts costs(6, LayerCost{1, 2, 10, 0, 1, 0});
  costs[5].forward_ms = 3;
  PlannerOptions options{.mode = PlanMode::kInference, .min_stages = 2};
  CHECK(choose_stages(costs, 4, options).forward == std::vector<Range>{{0, 4}, {4, 6}});
  options.max_stage_bytes = 20;
  CHECK(choose_stages(costs, 4, options).forward == std::vector<Range>{{0, 2}, {2, 4}, {4, 6}});
  options.max_stage_bytes = 9;
  CHECK_THROWS_WITH_AS(choose_stages(costs, 4, options), doctest::Contains("layer 0 needs 10 bytes"),
                       std::invalid_argument);
}

TEST_CASE("planner: bad arguments are named") {
  const LayerCosts costs(3);
  const auto refused = [&](PlannerOptions options, int devices, const char* text) {
    CHECK_THROWS_WITH_AS(choose_stages(costs, devices, options), doctest::Contains(text), std::invalid_argument);
  };
  refused({}, 0, "devices is 0");
  refused({.microbatches = 0}, 1, "microbatches is 0");
  refused({.min_stages = -1}, 1, "min_stages is -1");
  refused({.upper_threshold = 0.5}, 1, "upper_threshold");
  refused({.max_stage_bytes = -1}, 1, "max_stage_bytes");
  refused({.first_backward_layer = 4}, 1, "first_backward_layer is 4, expected 0 to 3");
  refused({.first_device = 2}, 2, "first_device is 2, expected 0 to 1");
  CHECK_THROWS_WITH_AS(make_plan({{{0, 2}}, {}}, 3, 1, {.mode = PlanMode::kInference}),
                       doctest::Contains("no job runs the forward of layer 2"), std::invalid_argument);
}
