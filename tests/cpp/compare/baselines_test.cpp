#include <roundpipe/compare/baselines.h>

#include <numeric>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/schedule/placer.h>

using namespace roundpipe::schedule;
using namespace roundpipe::compare;

TEST_CASE("baselines: valid plans that run every microbatch by itself on fixed devices") {
  for (const int layers : {2, 9, 33}) {
    for (const int devices : {1, 2, 4, 8}) {
      const LayerCosts costs(static_cast<std::size_t>(layers), {.forward_ms = 1, .backward_ms = 2});
      const BaselineSizes sizes = default_sizes(costs, devices);
      for (const Baseline baseline : {Baseline::kGPipe, Baseline::kOneForwardOneBack, Baseline::kInterleaved,
                                      Baseline::kLoopedBfs, Baseline::kPublished}) {
        const Plan plan = baseline_plan(baseline, sizes, layers, devices, 16);
        const bool breadth = baseline == Baseline::kGPipe || baseline == Baseline::kLoopedBfs;
        REQUIRE_NOTHROW(validate(plan, breadth ? PlanMode::kTrain : PlanMode::kFused));
        if (baseline == Baseline::kPublished) continue;
        std::vector<int> device_of(static_cast<std::size_t>(layers), -1);
        for (const Job& job : plan.jobs) {
          REQUIRE(job.microbatches.size() == 1);
          // The head belongs to the last stage, so look at the layers that start one.
          int& device = device_of[static_cast<std::size_t>(job.layers.first)];
          if (device < 0) device = job.device;
          REQUIRE(device == job.device);
        }
      }
    }
  }
}

TEST_CASE("baselines: order of 1F1B on two devices") {
  BaselineSizes sizes;
  sizes.pipeline = {1, 1};
  const Plan plan = baseline_plan(Baseline::kOneForwardOneBack, sizes, 3, 2, 3);
  std::vector<int> first;  // microbatch, negative - 1 for a backward
  for (const Job& job : plan.jobs) {
    if (job.device == 0)
      first.push_back(job.phase == Phase::kForward ? job.microbatches.first : -1 - job.microbatches.first);
  }
  CHECK(first == std::vector<int>{0, 1, -1, 2, -2, -3});
}

TEST_CASE("baselines: bad sizes") {
  BaselineSizes sizes;
  sizes.pipeline = {1, 3};
  sizes.chunks = {1, 1, 0};
  CHECK_THROWS_WITH_AS(baseline_plan(Baseline::kGPipe, sizes, 4, 2, 4), doctest::Contains("pipeline has 4 layers"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(baseline_plan(Baseline::kLoopedBfs, sizes, 3, 2, 4), doctest::Contains("multiple of the 2"),
                       std::invalid_argument);
  sizes.chunks = {1, 1, 0, 0};
  CHECK_THROWS_WITH_AS(baseline_plan(Baseline::kInterleaved, sizes, 3, 2, 3), doctest::Contains("microbatches is 3"),
                       std::invalid_argument);
}
