#include <roundpipe/schedule/moved_bytes.h>

#include <string>

#include <doctest/doctest.h>

using namespace roundpipe::schedule;

namespace {

constexpr std::int64_t kMB = 1'000'000;

// Three layers: the first frozen, the last the head.
LayerCosts costs() {
  LayerCost layer{.forward_ms = 1, .backward_ms = 2, .weight_bytes = 10 * kMB, .gradient_bytes = 10 * kMB};
  LayerCosts all(3, layer);
  all[0].gradient_bytes = 0;
  all[0].activation_bytes = 2 * kMB;
  all[1].activation_bytes = 3 * kMB;
  return all;
}

}  // namespace

TEST_CASE("moved bytes: weights by job, values once down and once up for each reader") {
  const Range both{0, 2};
  const Plan plan{3,
                  2,
                  2,
                  1,
                  {{Phase::kForward, {0, 1}, both, 0},
                   {Phase::kForward, {1, 2}, both, 1},
                   {Phase::kFused, {2, 3}, {0, 1}, 0},
                   {Phase::kFused, {2, 3}, {1, 2}, 1},
                   {Phase::kBackward, {1, 2}, both, 0}}};
  const CostSums sums(costs(), 1);
  const MovedBytes moved = moved_bytes(plan, costs(), sums);
  // Weights of five jobs; inputs of layers 1 (forward, backward) and 2, twice each; gradients at boundary 2.
  CHECK(moved.up == (50 + 2 * (2 + 2 + 3) + 2 * 3) * kMB);
  // Values at boundaries 1 and 2; gradients at 2; wide parameter sums of both heads, and parameter gradients of
  // layer 1.
  CHECK(moved.down == (2 * (2 + 3) + 2 * 3 + 2 * 20 + 10) * kMB);
  CHECK(moved.updated == 20 * kMB);
}

TEST_CASE("moved bytes: the optimizer updates adapters, not the layers that they are in") {
  const LayerCosts adapters(2, {.weight_bytes = 100'000'000, .gradient_bytes = 1'000'000});
  const Plan plan{2, 1, 1, 0, {{Phase::kFused, {0, 2}, {0, 1}, 0}}};
  CHECK(moved_bytes(plan, adapters, CostSums(adapters, 0)).updated == 2'000'000);
}

TEST_CASE("moved bytes: the least time is that of what is slowest") {
  Cluster cluster;
  cluster.devices.resize(2);
  const MovedBytes moved{.up = 60e6, .down = 30e6, .updated = 10e6};
  CHECK(least_time(moved, cluster, {}).ms == 0);
  cluster.link_up_gb_per_s = cluster.link_down_gb_per_s = 10;
  CHECK(least_time(moved, cluster, {}).ms == doctest::Approx(3));
  CHECK(std::string(least_time(moved, cluster, {}).limit) == "links up");
  cluster.host_gb_per_s = 18;
  CHECK(least_time(moved, cluster, {}).ms == doctest::Approx(5));
  CHECK(std::string(least_time(moved, cluster, {}).limit) == "host memory");
  CHECK(std::string(least_time(moved, cluster, {.gb_per_s = 1}).limit) == "optimizer");
  // 90 MB over the links and 9 bytes for each of 10 MB of weights.
  CHECK(least_time(moved, cluster, {.gb_per_s = 1, .traffic = 9}).ms == doctest::Approx(10));
  CHECK(least_time(moved, cluster, {.gb_per_s = 2, .traffic = 9}).ms == doctest::Approx(10));
  CHECK(std::string(least_time(moved, cluster, {.gb_per_s = 2, .traffic = 9}).limit) == "host memory");
  cluster.link_down_gb_per_s = 1;
  CHECK(std::string(least_time(moved, cluster, {}).limit) == "links down");
  CHECK(hop_ms(costs(), cluster) == doctest::Approx(3.0 / 10 + 3.0));
}
