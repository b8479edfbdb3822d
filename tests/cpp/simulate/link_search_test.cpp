#include <roundpipe/simulate/link_search.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/schedule/moved_bytes.h>

#include "../rounds.h"
#include "naive_links.h"

using namespace roundpipe::schedule;
using namespace roundpipe::simulate;

namespace {

constexpr double kMegabyte = 1e6;

struct LinkCase {
  std::string name;
  LayerCosts costs;
  Cluster cluster;
  int microbatches;
};

Cluster machine(int devices, double link, double host, std::int64_t memory_bytes = 0) {
  Cluster cluster;
  cluster.devices.assign(static_cast<std::size_t>(devices), {1, memory_bytes});
  cluster.link_up_gb_per_s = cluster.link_down_gb_per_s = link;
  cluster.host_gb_per_s = host;
  return cluster;
}

LayerCost layer(double forward_ms, double backward_ms, double weight_mb, double activation_mb) {
  return {.forward_ms = forward_ms,
          .backward_ms = backward_ms,
          .weight_bytes = static_cast<std::int64_t>(weight_mb * kMegabyte),
          .gradient_bytes = static_cast<std::int64_t>(weight_mb * kMegabyte),
          .activation_bytes = static_cast<std::int64_t>(activation_mb * kMegabyte)};
}

// Layers whose compute takes about as long as their transfers, on links of 12 or 25 GB/s.
std::vector<LinkCase> cases() {
  std::vector<LinkCase> all;
  const LayerCost even = layer(4, 9, 100, 8), head = layer(8, 16, 250, 0);
  LayerCosts plain(11, even);
  plain.push_back(head);
  all.push_back({"even layers, shared host", plain, machine(4, 25, 50), 5});
  all.push_back({"even layers, slow links", plain, machine(2, 12, 0), 4});
  all.push_back({"one device", plain, machine(1, 25, 0), 3});
  all.push_back({"memory for three layers", plain, machine(2, 25, 60, 1'000'000'000), 3});
  LayerCosts experts;
  for (int i = 0; i < 10; ++i) experts.push_back(i % 2 ? layer(3, 7, 400, 8) : layer(5, 11, 60, 8));
  experts.push_back(head);
  all.push_back({"every second layer has experts", experts, machine(3, 25, 0), 6});
  LayerCosts giant(9, even);
  giant[4] = layer(20, 45, 500, 8);
  giant.push_back(head);
  all.push_back({"one giant layer", giant, machine(4, 25, 80), 4});
  LayerCosts heavy(8, even);
  heavy.push_back(layer(30, 60, 300, 0));
  all.push_back({"a heavy head", heavy, machine(4, 12, 0), 4});
  Cluster unequal = machine(3, 25, 0);
  unequal.devices[0].speed = 2;
  all.push_back({"unequal devices", plain, unequal, 4});
  return all;
}

constexpr int kManySteps = 49;

double step_ms(const Plan& recipe, const LinkCase& of, const LinkRules& rules, int most_steps) {
  const int steps = rules.timing.asynchronous ? most_steps : 1;
  const std::vector<Plan> plans = place_over_links(recipe, of.costs, of.cluster, rules, steps);
  return simulate_links(plans, of.costs, of.cluster, rules).timeline.steady_step_ms;
}

PlannerOptions planner(int microbatches) {
  PlannerOptions options;
  options.microbatches = microbatches;
  return options;
}

// Every cut into even stages, with the head whole or shared, at three interleavings: the best simulated step.
double best_of_family(const LinkCase& of, const LinkRules& rules) {
  const CostSums sums(of.costs);
  const int end = sums.layers() - 1, devices = static_cast<int>(of.cluster.devices.size());
  const std::int64_t room = of.cluster.devices.front().memory_bytes;
  std::vector<std::pair<double, Plan>> family;
  for (int forward = 1; forward <= end; ++forward) {
    for (int backward = 1; backward <= end; ++backward) {
      Cut cut;
      for (const Range& layers : partitions_of(sums, {0, end}, false, room).cut(forward))
        cut.forward.push_back({layers, 1});
      std::vector<Range> stages = partitions_of(sums, {0, end}, true, room).cut(backward);
      if (cut.forward.empty() || stages.empty()) continue;
      std::ranges::reverse(stages);
      cut.backward.push_back({{end, end + 1}, 1});
      for (const Range& layers : stages) cut.backward.push_back({layers, 1});
      for (const int replicas : {1, devices}) {
        cut.backward.front().replicas = std::min(replicas, of.microbatches);
        for (const double interleave : {1.0, 1.15, 1.3}) {
          if (interleave > 1 && !rules.timing.asynchronous) continue;
          cut.interleave = interleave;
          const Plan recipe = to_recipe(cut, sums, devices, planner(of.microbatches));
          family.emplace_back(step_ms(recipe, of, rules, 9), recipe);
        }
      }
    }
  }
  std::ranges::stable_sort(family, {}, [](const auto& member) { return member.first; });
  double best_ms = std::numeric_limits<double>::infinity();
  for (std::size_t i = 0; i < std::min<std::size_t>(12, family.size()); ++i)
    best_ms = std::min(best_ms, step_ms(family[i].second, of, rules, kManySteps));
  return best_ms;
}

}  // namespace

TEST_CASE("links: every computation ends as a slow simulation of the same rules says") {
  std::mt19937 random(10);
  const auto below = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
  const auto about = [&](double value) { return value * (0.5 + below(1000) / 1000.0); };
  for (int round = 0; round < 200; ++round) {
    CAPTURE(round);
    LinkRules rules;
    LayerCosts costs;
    const int layers = 2 + below(5), devices = 1 + below(3), microbatches = 1 + below(4);
    for (int l = 0; l < layers; ++l) costs.push_back(layer(about(3), about(6), about(150), about(12)));
    Cluster cluster = machine(devices, about(20), below(2) ? about(30) : 0);
    // Unequal, so that no two requests come at the same moment by accident.
    for (ClusterDevice& device : cluster.devices) device.speed = about(1);
    rules.timing.asynchronous = below(2) == 0;
    rules.priorities = below(4) > 0;
    rules.chunk_bytes = below(3) ? static_cast<std::int64_t>(about(20 * kMegabyte)) : 0;
    rules.update.gb_per_s = below(2) ? about(40) : 0;
    rules.update.traffic = below(2) ? about(10) : 0;
    if (below(4) == 0) cluster.link_down_gb_per_s = about(20);
    CAPTURE(rules.priorities);
    CAPTURE(rules.timing.asynchronous);
    Cut cut;
    cut.interleave = rules.timing.asynchronous ? 1 + below(4) / 10.0 : 1;
    for (int first = 0; first < layers - 1;) {
      const int last = std::min(layers - 1, first + 1 + below(3));
      cut.forward.push_back({{first, last}, 1 + below(2)});
      first = last;
    }
    cut.backward.push_back({{layers - 1, layers}, 1 + below(2)});
    for (int last = layers - 1; last > 0;) {
      const int first = std::max(0, last - 1 - below(3));
      cut.backward.push_back({{first, last}, 1 + below(2)});
      last = first;
    }
    const Plan recipe = to_recipe(cut, CostSums(costs), devices, planner(microbatches));
    const std::vector<Plan> plans = place_over_links(recipe, costs, cluster, rules, 3);
    const LinkTimeline fast = simulate_links(plans, costs, cluster, rules);
    naive::Links slow(plans, costs, cluster, rules);
    const auto ends_ms = slow.run();
    CHECK(fast.timeline.events.size() == ends_ms.size());
    for (const TimelineEvent& event : fast.timeline.events) {
      CAPTURE(event.step);
      CAPTURE(event.job);
      CHECK(event.end_ms == doctest::Approx(ends_ms.at({event.step, event.job, event.microbatch})).epsilon(1e-6));
    }
    CHECK(fast.landed_ms == doctest::Approx(slow.landed_ms()).epsilon(1e-6));
    double through_host = 0;
    for (const Plan& plan : plans) {
      const MovedBytes moved = moved_bytes(plan, costs, CostSums(costs));
      through_host += moved.up + moved.down + rules.update.traffic * moved.updated;
    }
    if (cluster.host_gb_per_s > 0) CHECK(fast.landed_ms >= (1 - 1e-9) * through_host / (cluster.host_gb_per_s * 1e6));
    // Without a limit of the host's memory, nothing depends on what updates move.
    cluster.host_gb_per_s = 0;
    const double counted_ms = simulate_links(plans, costs, cluster, rules).landed_ms;
    rules.update.traffic = 0;
    CHECK(counted_ms == simulate_links(plans, costs, cluster, rules).landed_ms);
  }
}

namespace {

// Runs `check` for each case, in asynchronous and synchronous steps. The short form takes every second case from
// `first` on, and the two kinds of steps by turns.
template <typename Check>
void for_each_case(int first, std::int64_t effort, Check check) {
  const std::vector<LinkCase> all = cases();
  bool next = true;
  for (int i = rounds(first, 0); i < static_cast<int>(all.size()); i += rounds(2, 1)) {
    const LinkCase& of = all[static_cast<std::size_t>(i)];
    next = !next;
    for (int kind = 0; kind < rounds(1, 2); ++kind) {
      const bool asynchronous = kind == 0 ? next : !next;
      CAPTURE(of.name);
      CAPTURE(asynchronous);
      LinkRules rules;
      rules.timing.asynchronous = asynchronous;
      SearchOptions options;
      options.plan = planner(of.microbatches);
      options.effort = effort;
      check(of, rules, options);
    }
  }
}

}  // namespace

TEST_CASE("link search: within 2 % of the best even cut, and never worse than the greedy plan") {
  for_each_case(0, 20'000'000, [&](const LinkCase& of, const LinkRules& rules, SearchOptions options) {
    const std::vector<PlanChoice> found = search_links(of.costs, of.cluster, options, rules);
    const double chosen_ms = step_ms(found.front().recipe, of, rules, kManySteps);
    double work_ms = 0;
    for (const LayerCost& cost : of.costs) work_ms += of.microbatches * (2 * cost.forward_ms + cost.backward_ms);
    work_ms -= of.microbatches * of.costs.back().forward_ms;  // the head's values are kept
    for (const PlanChoice& choice : found) CHECK(choice.rating.work_ms == doctest::Approx(work_ms));
    CHECK(found.front().rating.step_ms == doctest::Approx(chosen_ms).epsilon(0.01));
    CHECK(chosen_ms <= 1.02 * best_of_family(of, rules));
    const int devices = static_cast<int>(of.cluster.devices.size());
    const Cut greedy =
        limited_cut(to_cut(greedy_stages(of.costs, devices, options.plan)), static_cast<int>(of.costs.size()), options);
    if (of.cluster.devices.front().memory_bytes > 0) return;
    const Plan recipe = to_recipe(greedy, CostSums(of.costs), devices, options.plan);
    CHECK(chosen_ms <= 1.0011 * step_ms(recipe, of, rules, kManySteps));
  });
}

TEST_CASE("link search: replicas of stages with gradients keep to the groups of microbatches") {
  for_each_case(1, 2'000'000, [&](const LinkCase& of, const LinkRules& rules, SearchOptions options) {
    options.plan.gradient_groups = 1;
    for (const PlanChoice& choice : search_links(of.costs, of.cluster, options, rules)) {
      for (const Job& job : choice.recipe.jobs) {
        if (job.phase != Phase::kForward) CHECK(job.microbatches == Range{0, of.microbatches});
      }
    }
  });
}

TEST_CASE("link search: no more waits on the host than may") {
  for_each_case(1, 2'000'000, [&](const LinkCase& of, const LinkRules& rules, SearchOptions options) {
    const CostSums sums(of.costs);
    const auto waiting = [&](const PlanChoice& choice) { return waiting_bytes(choice.cut, sums, of.microbatches); };
    const std::int64_t free = waiting(search_links(of.costs, of.cluster, options, rules).front());
    // With memory for few layers, backward stages are short, so that much waits in any plan.
    bool is_possible = false;
    for (int twelfths = 8; !is_possible && twelfths <= 12; ++twelfths) {
      options.max_waiting_bytes = free * twelfths / 12;
      try {
        for (const PlanChoice& choice : search_links(of.costs, of.cluster, options, rules))
          CHECK(waiting(choice) <= options.max_waiting_bytes);
        is_possible = true;
      } catch (const HostTooSmall&) {
        CHECK(of.cluster.devices.front().memory_bytes > 0);
      }
    }
    CHECK(is_possible);
    options.max_waiting_bytes = 1;
    CHECK_THROWS_AS(search_links(of.costs, of.cluster, options, rules), HostTooSmall);
  });
}

TEST_CASE("link search: more memory and faster links give no worse plan, within a percent") {
  // Either may change where jobs are placed.
  constexpr double kPlaced = 0.01;
  for_each_case(1, 20'000'000, [&](const LinkCase& of, const LinkRules& rules, const SearchOptions& options) {
    const auto found_ms = [&](const Cluster& cluster) {
      const PlanChoice choice = search_links(of.costs, cluster, options, rules).front();
      return step_ms(choice.recipe, {of.name, of.costs, cluster, of.microbatches}, rules, 2 * kManySteps);
    };
    double least_ms = found_ms(of.cluster);
    const auto loosened = [&](const std::string& what, const Cluster& cluster) {
      CAPTURE(what);
      const double ms = found_ms(cluster);
      CHECK(ms <= least_ms * (1 + kPlaced));
      least_ms = ms;
    };
    Cluster cluster = of.cluster;
    for (ClusterDevice& device : cluster.devices) device.memory_bytes = 0;
    if (of.cluster.devices.front().memory_bytes > 0) loosened("memory", cluster);
    cluster.link_up_gb_per_s *= 2;
    cluster.link_down_gb_per_s *= 2;
    cluster.host_gb_per_s *= 2;
    loosened("links", cluster);
  });
}

TEST_CASE("link search: never worse than the cuts that are known") {
  constexpr double kRated = 0.002;  // ties
  int better = 0;
  for_each_case(0, 4'000'000, [&](const LinkCase& of, const LinkRules& rules, SearchOptions options) {
    const auto found = [&] { return search_links(of.costs, of.cluster, options, rules).front(); };
    const auto ms_of = [&](const PlanChoice& choice) { return step_ms(choice.recipe, of, rules, kManySteps); };
    const double alone_ms = ms_of(found());
    options.effort = 20'000'000;
    const PlanChoice known = found();
    options.effort = 4'000'000;
    options.starts = {known.cut};
    const double started_ms = ms_of(found());
    CHECK(started_ms <= ms_of(known) * (1 + kRated));
    better += started_ms < alone_ms;
    options.interleave = options.replicas = false;
    for (const PlanChoice& choice : search_links(of.costs, of.cluster, options, rules)) {
      CHECK(choice.cut.interleave == 1);
      for (const CutStage& stage : choice.cut.backward) CHECK(stage.replicas == 1);
    }
  });
  CHECK(better > 0);
}

TEST_CASE("link search: more effort than the default never gives a worse plan") {
  const LinkCase of = cases().front();
  for (int kind = 0; kind < rounds(1, 2); ++kind) {
    CAPTURE(kind);
    LinkRules rules;
    rules.timing.asynchronous = kind == 0;
    SearchOptions options;
    options.plan = planner(of.microbatches);
    const auto found_ms = [&] {
      return step_ms(search_links(of.costs, of.cluster, options, rules).front().recipe, of, rules, kManySteps);
    };
    const double once_ms = found_ms();
    options.effort *= 2;
    CHECK(found_ms() <= once_ms * 1.002);
  }
}

TEST_CASE("link search: a plan takes as long as it promises, however little effort is spent") {
  const auto check = [](const LinkCase& of, const SearchOptions& options) {
    CAPTURE(of.name);
    LinkRules rules;
    rules.timing = options.rules;
    const PlanChoice found = search_links(of.costs, of.cluster, options, rules).front();
    CAPTURE(to_string(found.cut));
    CHECK(step_ms(found.recipe, of, rules, 193) == doctest::Approx(found.rating.step_ms).epsilon(2e-4));
  };
  SearchOptions options;
  options.rules.asynchronous = true;
  options.plan = planner(16);
  options.plan.gradient_groups = 1;
  options.effort = 10'000;
  // One job a step, on unequal devices in turn: the ends of a few steps tell little of its pace.
  options.max_fused_layers = 17;
  Cluster unequal = machine(2, 0, 0);
  unequal.devices[1].speed = 0.75;
  LayerCosts costs(16, layer(19, 43, 450, 67));
  costs.push_back(layer(50, 100, 1000, 0));
  check({"one job", costs, unequal, 16}, options);

  std::mt19937 random(7);
  const auto between = [&](double least, double most) { return least + (most - least) * (random() % 1000) / 1000.0; };
  for (int round = 0; round < rounds(6, 120); ++round) {
    LayerCosts uneven;
    const int layers = 1 + static_cast<int>(random() % 12);
    for (int l = 0; l < layers; ++l)
      uneven.push_back(layer(between(3, 40), between(6, 90), between(50, 700), between(1, 60)));
    const bool has_rates = random() % 4 > 0;
    const double link = has_rates ? between(6, 25) : 0;
    Cluster cluster = machine(1 + static_cast<int>(random() % 4), link, has_rates && random() % 2 > 0 ? 50 : 0);
    for (ClusterDevice& device : cluster.devices) device.speed = random() % 3 > 0 ? 1 : 0.6;
    options.plan = planner(2 + static_cast<int>(random() % 7));
    options.plan.gradient_groups = static_cast<int>(random() % 2);
    options.rules.asynchronous = random() % 2 > 0;
    options.max_fused_layers = 1 + static_cast<int>(random() % 3);
    options.effort = 100'000;
    check({"round " + std::to_string(round), uneven, cluster, options.plan.microbatches}, options);
  }
}

TEST_CASE("links: the clock without their simulator lets values hop and gradients queue") {
  // Three jobs of 1 ms each end one after the other; each has 10 ms of gradients, and only the last values matter.
  LinkCase of{"down", LayerCosts(3, layer(1, 1, 10, 0)), machine(1, 0, 0), 1};
  of.cluster.link_down_gb_per_s = 1;
  SearchOptions options;
  options.plan = planner(1);
  options.rules.asynchronous = false;
  LinkRules rules;
  rules.timing = options.rules;
  const CostSums sums(of.costs);
  const Cut single{{{{0, 1}, 1}, {{1, 2}, 1}}, {{{2, 3}, 1}, {{1, 2}, 1}, {{0, 1}, 1}}, 1};
  const Plan recipe = to_recipe(single, sums, 1, options.plan);
  CHECK(rate(recipe, of.costs, of.cluster, options.rules, 1).step_ms == doctest::Approx(step_ms(recipe, of, rules, 1)));

  // Values between layers, and nothing else.
  for (LayerCost& cost : of.costs) {
    cost.weight_bytes = cost.gradient_bytes = 0;
    cost.activation_bytes = 5'000'000;
  }
  of.cluster.link_up_gb_per_s = 1;
  CHECK(rate(recipe, of.costs, of.cluster, options.rules, 1).step_ms == doctest::Approx(step_ms(recipe, of, rules, 1)));
}

TEST_CASE("link search: fewer layers than the fused stage may have") {
  SearchOptions options;
  options.max_fused_layers = 50;
  options.effort = 1'000'000;
  for (int layers = 1; layers <= 4; ++layers) {
    options.plan = planner(2);
    const PlanChoice found =
        search_links(LayerCosts(static_cast<std::size_t>(layers), layer(1, 2, 1, 1)), machine(2, 10, 0), options, {})
            .front();
    CHECK(found.cut.backward.front().layers.size() <= layers);
  }
}

TEST_CASE("link search: on the host's cores, computing, moving and updating add up") {
  const LayerCosts costs(6, layer(10, 20, 4, 1));
  Cluster cluster = machine(2, 1, 0);
  SearchOptions options;
  options.plan = planner(4);
  LinkRules rules;
  rules.update.gb_per_s = 0.5;
  rules.timing.asynchronous = false;
  const auto rated = [&](const Cluster& of) {
    LinkRating rating(costs, of, options, rules, 1);
    PlanChoice choice = rating.choice_of(to_cut(greedy_stages(costs, 2, options.plan)));
    REQUIRE(rating.rate(choice, Precision::kReport));
    return std::pair(choice, rating.limit_of(choice));
  };
  const auto [apart, limit] = rated(cluster);
  cluster.on_host_cores = true;
  const auto [together, limit_together] = rated(cluster);
  const MovedBytes moved = moved_bytes(apart.recipe, costs, sums_of(costs, options.plan));
  const double work_ms = apart.rating.work_ms / 2;
  const double in_turn_ms = work_ms + (moved.up + moved.down) / 1e6 + moved.updated / 0.5e6;
  CHECK(apart.rating.step_ms < in_turn_ms);
  CHECK(together.rating.step_ms == doctest::Approx(in_turn_ms));
  CHECK(together.rating.bubble == doctest::Approx(1 - work_ms / in_turn_ms));
  CHECK(limit != "the host's cores");
  CHECK(limit_together == "the host's cores");
}

TEST_CASE("link search: frozen weights that stay are moved once, on the host's cores too") {
  LayerCost frozen = layer(10, 20, 4, 1);
  frozen.frozen_bytes = 3'000'000;
  const LayerCosts costs(6, frozen);
  Cluster cluster = machine(1, 1, 0);
  cluster.on_host_cores = true;
  SearchOptions options;
  options.plan = planner(4);
  LinkRules rules;
  rules.timing.asynchronous = false;
  const auto rated = [&] {
    LinkRating rating(costs, cluster, options, rules, 1);
    PlanChoice choice = rating.choice_of(to_cut(greedy_stages(costs, 2, options.plan)));
    REQUIRE(rating.rate(choice, Precision::kReport));
    return choice;
  };
  const PlanChoice moved = rated();
  cluster.devices[0].resident_bytes = 1'000'000'000;
  const PlanChoice kept = rated();
  double again_bytes = 0;
  for (int l = 0; l < 6; ++l) {
    const auto visits = std::ranges::count_if(
        kept.recipe.jobs, [&](const Job& job) { return job.layers.first <= l && l < job.layers.last; });
    again_bytes += static_cast<double>(visits - 1) * 3'000'000;
  }
  CHECK(again_bytes > 0);
  CHECK(kept.rating.step_ms == doctest::Approx(moved.rating.step_ms - again_bytes / 1e6));
}

TEST_CASE("link search: what limits the step is what shortens it if it is made fast") {
  const LinkCase slow_links{"slow links", LayerCosts(8, layer(1, 2, 300, 1)), machine(2, 10, 0), 2};
  const auto limit = [](const LinkCase& of, UpdateRate update) {
    LinkRules rules;
    rules.update = update;
    SearchOptions options;
    options.plan = planner(of.microbatches);
    options.effort = 2'000'000;
    return search_links(of.costs, of.cluster, options, rules).front().limit;
  };
  CHECK(limit(slow_links, {}) == "links up");
  LinkCase shared = slow_links;
  shared.cluster = machine(2, 100, 12);
  CHECK(limit(shared, {}) == "host memory");
  LinkCase optimizer = slow_links;
  optimizer.cluster = machine(2, 100, 0);
  CHECK(limit(optimizer, {.gb_per_s = 10}) == "optimizer");
  // Updates that take most of the host's memory.
  optimizer.cluster = machine(2, 100, 50);
  CHECK(limit(optimizer, {.traffic = 13}) == "host memory");
  const LinkCase compute{"compute", LayerCosts(8, layer(20, 40, 10, 1)), machine(2, 25, 0), 4};
  CHECK(limit(compute, {}) == "compute");
}
