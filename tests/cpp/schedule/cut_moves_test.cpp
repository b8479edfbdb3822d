#include <roundpipe/schedule/cut_moves.h>

#include <algorithm>
#include <set>
#include <string>

#include <doctest/doctest.h>

using namespace roundpipe::schedule;

namespace {

constexpr int kLayers = 9, kDevices = 4;

// Whether the stages cover [first, last), one after another; `downwards`: from the last layers down.
bool covers(const std::vector<CutStage>& stages, int first, int last, bool downwards) {
  int at = downwards ? last : first;
  for (const CutStage& stage : stages) {
    if (stage.layers.size() < 1 || (downwards ? stage.layers.last : stage.layers.first) != at) return false;
    at = downwards ? stage.layers.first : stage.layers.last;
  }
  return at == (downwards ? first : last);
}

}  // namespace

TEST_CASE("cut moves: neighbours cover all layers, keep the fused stage and the limits of replicas") {
  const LayerCosts costs(kLayers, {.forward_ms = 1, .backward_ms = 2, .weight_bytes = 4, .gradient_bytes = 4});
  const CostSums sums(costs);
  SearchOptions options;
  options.plan.microbatches = 6;
  options.plan.gradient_groups = 3;
  options.rules.asynchronous = true;
  const CutMoves moves(options, sums, kDevices);
  std::mt19937 random(7);
  Cut at;
  at.forward = {{{0, 3}, 1}, {{3, 7}, 1}};
  at.backward = {{{7, 9}, 1}, {{4, 7}, 1}, {{0, 4}, 1}};
  std::set<std::string> met;
  int most_forward = 1, most_backward = 1;
  for (int step = 0; step < 4000; ++step) {
    const std::optional<Cut> next = moves.neighbour(at, random);
    if (!next) continue;
    REQUIRE(covers(next->forward, 0, 7, false));
    REQUIRE(covers(next->backward, 0, kLayers, true));
    REQUIRE(next->backward.front().layers == Range{7, 9});
    REQUIRE((next->interleave >= 1 && next->interleave <= CutMoves::kMostInterleave));
    for (const CutStage& stage : next->forward) most_forward = std::max(most_forward, stage.replicas);
    for (const CutStage& stage : next->backward) most_backward = std::max(most_backward, stage.replicas);
    met.insert(to_string(*next));
    at = *next;
  }
  CHECK(met.size() > 1000);
  CHECK(most_forward == kDevices);
  CHECK(most_backward == options.plan.gradient_groups);
}

TEST_CASE("cut moves: one layer on one device has no neighbour but itself") {
  const LayerCosts costs(1, {.forward_ms = 1, .backward_ms = 2});
  const CostSums sums(costs);
  SearchOptions options;
  options.interleave = false;
  const CutMoves moves(options, sums, 1);
  std::mt19937 random(1);
  const Cut only{.forward = {}, .backward = {{{0, 1}, 1}}};
  for (int step = 0; step < 100; ++step) {
    const std::optional<Cut> next = moves.neighbour(only, random);
    CHECK((!next || *next == only));
  }
}
