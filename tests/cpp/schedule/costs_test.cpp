#include <roundpipe/schedule/costs.h>

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
