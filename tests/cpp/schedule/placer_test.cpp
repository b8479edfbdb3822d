#include <roundpipe/schedule/placer.h>

#include <set>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

using namespace roundpipe::schedule;

namespace {

constexpr std::int64_t kMB = 1'000'000;

// `layers` equal layers whose weights are frozen but for a tenth.
LayerCosts adapted(int layers) {
  return LayerCosts(static_cast<std::size_t>(layers), {.forward_ms = 10,
                                                       .backward_ms = 20,
                                                       .weight_bytes = 10 * kMB,
                                                       .gradient_bytes = kMB,
                                                       .activation_bytes = 1000,
                                                       .frozen_bytes = 9 * kMB});
}

Cluster cluster_of(int devices, std::int64_t resident_bytes, double gb_per_s) {
  Cluster cluster;
  cluster.devices.resize(static_cast<std::size_t>(devices), {1, 0, resident_bytes});
  cluster.link_up_gb_per_s = cluster.link_down_gb_per_s = gb_per_s;
  return cluster;
}

// Each layer by itself: forward of all but the last, which is fused, then backward.
Plan single_layers(int layers, int microbatches, int devices) {
  const Range all{0, microbatches};
  Plan plan{layers, microbatches, devices, 0, {}};
  for (int l = 0; l + 1 < layers; ++l) plan.jobs.push_back({Phase::kForward, {l, l + 1}, all, 0});
  plan.jobs.push_back({Phase::kFused, {layers - 1, layers}, all, 0});
  for (int l = layers - 1; l-- > 0;) plan.jobs.push_back({Phase::kBackward, {l, l + 1}, all, 0});
  for (std::size_t i = 0; i < plan.jobs.size(); ++i)
    plan.jobs[i].order = static_cast<double>(i) / static_cast<double>(plan.jobs.size());
  return plan;
}

// The pairs of a device and a layer that it meets, over some steps.
std::set<std::pair<int, int>> met(Placer& placer, int steps) {
  std::set<std::pair<int, int>> pairs;
  for (int step = 0; step < steps; ++step) {
    for (const Job& job : placer.next().jobs) {
      for (int l = job.layers.first; l < job.layers.last; ++l) pairs.insert({job.device, l});
    }
  }
  return pairs;
}

}  // namespace

TEST_CASE("placer: jobs come back to devices that keep their weights, where they end no later for it") {
  for (const double gb_per_s : {0.0, 1.0}) {
    for (const bool asynchronous : {false, true}) {
      const Plan recipe = single_layers(6, 4, 3);
      const TimingRules rules{.asynchronous = asynchronous};
      const LayerCosts costs = adapted(6);
      Placer keeping(recipe, costs, cluster_of(3, 100 * kMB, gb_per_s), rules);
      Placer without(recipe, costs, cluster_of(3, 0, gb_per_s), rules);
      CHECK(keeping.keeps_weights());
      CHECK_FALSE(without.keeps_weights());
      const auto drawn = met(keeping, 12), free = met(without, 12);
      CHECK(drawn.size() <= free.size());
      CHECK(keeping.end_ms() <= without.end_ms());
    }
  }
}

TEST_CASE("placer: of devices on which a job ends alike, it goes to the one that keeps its weights") {
  // The second job waits for the first anyway, so both devices are free in time.
  const Range all{0, 1};
  const Plan recipe{2, 1, 2, 0, {{Phase::kForward, {0, 1}, all, 0, 0}, {Phase::kForward, {1, 2}, all, 0, 0.5}}};
  Placer placer(recipe, adapted(2), cluster_of(2, 100 * kMB, 0), TimingRules{.asynchronous = false});
  std::vector<int> first = placer.advance();
  for (int step = 0; step < 4; ++step) CHECK(placer.advance() == first);
}

TEST_CASE("placer: kept weights make the predicted step shorter where links are slow, and never longer") {
  const Plan recipe = single_layers(6, 2, 2);
  const LayerCosts costs = adapted(6);
  for (const bool asynchronous : {false, true}) {
    const TimingRules rules{.asynchronous = asynchronous};
    double before_ms = rate(recipe, costs, cluster_of(2, 0, 0.2), rules, 12).step_ms;
    for (const std::int64_t room : {9 * kMB, 27 * kMB, 54 * kMB}) {
      const double now_ms = rate(recipe, costs, cluster_of(2, room, 0.2), rules, 12).step_ms;
      CHECK(now_ms <= before_ms * (1 + 1e-9));
      before_ms = now_ms;
    }
    CHECK(before_ms < rate(recipe, costs, cluster_of(2, 0, 0.2), rules, 12).step_ms);
  }
}
