#include <roundpipe/schedule/costs.h>

#include <stdexcept>

#include <doctest/doctest.h>

using namespace roundpipe::schedule;

TEST_CASE("costs: layers of one size get their mean times where these differ little, and keep them elsewhere") {
  LayerCosts costs(5, {.forward_ms = 1, .backward_ms = 2, .weight_bytes = 100, .gradient_bytes = 100});
  costs[1].forward_ms = 1.04;
  costs[2].forward_ms = 0.96;
  costs[1].backward_ms = 3;   // not by chance: the backwards of this size stay as they are
  costs[3].weight_bytes = 1;  // another size
  costs[3].forward_ms = 1.02;
  average_alike(costs, 0.1);
  for (const int l : {0, 1, 2, 4}) CHECK(costs[static_cast<std::size_t>(l)].forward_ms == doctest::Approx(1));
  CHECK(costs[3].forward_ms == 1.02);
  CHECK(costs[0].backward_ms == 2);
  CHECK(costs[1].backward_ms == 3);

  costs[0].forward_ms = 1.2;
  average_alike(costs, 0.1);
  CHECK(costs[0].forward_ms == 1.2);
  CHECK(costs[4].forward_ms == doctest::Approx(1));
}

TEST_CASE("costs: layers that take no time stay so") {
  LayerCosts costs(2);
  average_alike(costs, 0.1);
  CHECK(costs[1].forward_ms == 0);
}

TEST_CASE("costs: a device keeps the frozen weights of layers that it meets, as long as it has room") {
  const LayerCosts costs(3, {.forward_ms = 1, .weight_bytes = 100, .frozen_bytes = 80});
  Cluster cluster;
  cluster.devices = {{1, 0, 170}, {1, 0, 0}};
  KeptWeights kept(costs, cluster);
  CHECK(kept.any());
  CHECK(kept.kept_bytes({0, 3}, 0) == 0);
  kept.meet({1, 3}, 0);
  kept.meet({1, 3}, 0);
  kept.meet({0, 1}, 0);  // no room any more
  kept.meet({0, 3}, 1);
  CHECK(kept.kept_bytes({0, 3}, 0) == 160);
  CHECK(kept.kept_bytes({0, 2}, 0) == 80);
  CHECK(kept.kept_bytes({0, 3}, 1) == 0);
}

TEST_CASE("costs: nothing is kept without frozen weights or without room") {
  Cluster cluster;
  cluster.devices = {{1, 0, 170}};
  CHECK_FALSE(KeptWeights(LayerCosts(2, {.weight_bytes = 100}), cluster).any());
  cluster.devices = {{1, 170, 0}};
  KeptWeights kept(LayerCosts(2, {.weight_bytes = 100, .frozen_bytes = 80}), cluster);
  CHECK_FALSE(kept.any());
  kept.meet({0, 2}, 0);
  CHECK(kept.kept_bytes({0, 2}, 0) == 0);
}

TEST_CASE("costs: more frozen bytes than weights, and room below zero, are refused") {
  CHECK_THROWS_AS(validate(LayerCosts(1, {.weight_bytes = 10, .frozen_bytes = 11})), std::invalid_argument);
  Cluster cluster;
  cluster.devices = {{1, 0, -1}};
  CHECK_THROWS_AS(validate(cluster), std::invalid_argument);
}
