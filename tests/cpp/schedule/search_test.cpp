#include <roundpipe/schedule/search.h>

#include <algorithm>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "../rounds.h"

using namespace roundpipe::schedule;

namespace {

constexpr double kTie = 0.0011;  // plans within 0.1 % are equal to the search

Cluster cluster_of(int devices, double hop_ms = 0) {
  Cluster cluster;
  cluster.devices.resize(static_cast<std::size_t>(devices));
  cluster.hop_latency_ms = hop_ms;
  return cluster;
}

SearchOptions options_of(int microbatches, bool asynchronous, std::int64_t effort) {
  SearchOptions options;
  options.plan.microbatches = microbatches;
  options.rules.asynchronous = asynchronous;
  options.effort = effort;
  return options;
}

LayerCosts costs_of_a_search(std::mt19937& random, int layers) {
  LayerCosts costs;
  for (int layer = 0; layer < layers; ++layer) {
    const double factor = 0.6 + 0.8 * static_cast<double>(random() % 1000) / 1000;
    costs.push_back({.forward_ms = 10 * factor, .backward_ms = 22 * factor, .weight_bytes = 1000});
  }
  return costs;
}

// Rates the plan in another way than the search: by the simulator's rules, written once more for one device at a time.
double makespan_ms(const Plan& plan, const LayerCosts& costs, double hop_ms) {
  const auto at = [&](int boundary, int m) { return static_cast<std::size_t>(boundary * plan.microbatches + m); };
  const std::size_t cells = static_cast<std::size_t>((plan.layers + 1) * plan.microbatches);
  std::vector<double> value(cells, 0), gradient(cells, 0), free(static_cast<std::size_t>(plan.devices), 0);
  std::vector<int> value_device(cells, -1), gradient_device(cells, -1);
  double end = 0;
  for (const Job& job : plan.jobs) {
    double forward = 0, backward = 0;
    for (int layer = job.layers.first; layer < job.layers.last; ++layer) {
      forward += costs[static_cast<std::size_t>(layer)].forward_ms;
      backward += costs[static_cast<std::size_t>(layer)].backward_ms;
    }
    double& clock = free[static_cast<std::size_t>(job.device)];
    for (int m = job.microbatches.first; m < job.microbatches.last; ++m) {
      double start = clock;
      if (job.layers.first > 0) {
        const std::size_t from = at(job.layers.first, m);
        start = std::max(start, value[from] + (value_device[from] == job.device ? 0 : hop_ms));
      }
      if (job.phase == Phase::kBackward) {
        const std::size_t from = at(job.layers.last, m);
        start = std::max(start, gradient[from] + (gradient_device[from] == job.device ? 0 : hop_ms) - forward);
      }
      clock = start + forward + (job.phase == Phase::kForward ? 0 : backward);
      for (int boundary = job.layers.first + 1; job.phase != Phase::kBackward && boundary <= job.layers.last;
           ++boundary) {
        value[at(boundary, m)] = clock;
        value_device[at(boundary, m)] = job.device;
      }
      if (job.phase != Phase::kForward) {
        gradient[at(job.layers.first, m)] = clock;
        gradient_device[at(job.layers.first, m)] = job.device;
      }
      end = std::max(end, clock);
    }
  }
  return end;
}

}  // namespace

TEST_CASE("search: every plan is valid, keeps its limits and is predicted right") {
  std::mt19937 random(11);
  for (int round = 0; round < rounds(12, 150); ++round) {
    const int layers = 1 + static_cast<int>(random() % (round % 10 == 0 ? 128 : 24));
    const int devices = 1 + static_cast<int>(random() % 16);
    LayerCosts costs = costs_of_a_search(random, layers);
    Cluster cluster = cluster_of(devices, static_cast<double>(random() % 3));
    if (random() % 3 == 0) {
      for (ClusterDevice& device : cluster.devices)
        device.memory_bytes = 5000 + static_cast<std::int64_t>(random() % 9000);
    }
    SearchOptions options = options_of(1 + static_cast<int>(random() % 64), random() % 2 == 0, 200'000);
    options.plan.mode = std::vector{PlanMode::kInference, PlanMode::kTrain, PlanMode::kFused}[random() % 3];
    options.plan.first_backward_layer =
        static_cast<int>(random() % 4 == 0 ? random() % static_cast<unsigned>(layers) : 0);
    options.replicas = random() % 2 == 0;
    options.max_fused_layers = 1 + static_cast<int>(random() % 4);
    options.max_traffic = random() % 2 == 0 ? 0 : 1.25;
    const std::vector<PlanChoice> choices = search(costs, cluster, options);
    REQUIRE(!choices.empty());
    const CostSums sums(costs, options.plan.first_backward_layer);
    for (const PlanChoice& choice : choices) {
      REQUIRE_NOTHROW(validate(choice.recipe, options.plan.mode));
      // A tie goes to the plan that moves less.
      REQUIRE(choice.rating.step_ms >= choices.front().rating.step_ms * (1 - kTie));
      REQUIRE(choice.traffic == doctest::Approx(traffic_ratio(choice.recipe, sums)));
      if (options.max_traffic > 0) REQUIRE(choice.traffic <= options.max_traffic + 1e-6);
      for (const Job& job : choice.recipe.jobs) {
        if (!options.replicas) REQUIRE(job.microbatches.size() == options.plan.microbatches);
        if (job.phase == Phase::kFused) REQUIRE(job.layers.size() <= options.max_fused_layers);
      }
    }
    Placer placer(choices.front().recipe, costs, cluster, options.rules);
    for (int step = 0; step < 3; ++step) REQUIRE_NOTHROW(validate(placer.next(), options.plan.mode));
    const std::vector<PlanChoice> again = search(costs, cluster, options);
    REQUIRE(again.front().recipe == choices.front().recipe);
  }
}

TEST_CASE("search: jobs with gradients begin and end between groups of microbatches") {
  std::mt19937 random(15);
  int shared = 0;
  for (int round = 0; round < rounds(15, 40); ++round) {
    LayerCosts costs = costs_of_a_search(random, 4 + static_cast<int>(random() % 12));
    for (LayerCost& cost : costs) cost.gradient_bytes = random() % 2 ? cost.weight_bytes : 0;
    SearchOptions options = options_of(2 + static_cast<int>(random() % 15), random() % 2 == 0, 300'000);
    options.plan.gradient_groups = 1 + static_cast<int>(random() % 4);
    const int groups = std::min(options.plan.gradient_groups, options.plan.microbatches);
    std::vector<int> ends{0};
    for (int group = 0; group < groups; ++group) {
      const bool larger = group < options.plan.microbatches % groups;
      ends.push_back(ends.back() + options.plan.microbatches / groups + (larger ? 1 : 0));
    }
    const Cluster cluster = cluster_of(2 + static_cast<int>(random() % 7), 1);
    for (const PlanChoice& choice : search(costs, cluster, options)) {
      REQUIRE_NOTHROW(validate(choice.recipe, options.plan.mode));
      for (const Job& job : choice.recipe.jobs) {
        if (job.phase == Phase::kForward || CostSums(costs).gradient_bytes(job.layers) == 0) continue;
        REQUIRE(std::ranges::find(ends, job.microbatches.first) != ends.end());
        REQUIRE(std::ranges::find(ends, job.microbatches.last) != ends.end());
        if (job.microbatches.size() < options.plan.microbatches) ++shared;
      }
      // The description of a cut names the replicas that its plan has.
      std::size_t replicas = 0;
      for (const CutStage& stage : choice.cut.forward) replicas += static_cast<std::size_t>(stage.replicas);
      for (const CutStage& stage : choice.cut.backward) replicas += static_cast<std::size_t>(stage.replicas);
      REQUIRE(choice.recipe.jobs.size() == replicas);
    }
  }
  CHECK(shared > 0);
}

TEST_CASE("search: looser limits never give a worse plan") {
  std::mt19937 random(16);
  for (int round = 0; round < rounds(2, 30); ++round) {
    CAPTURE(round);
    LayerCosts costs = costs_of_a_search(random, 6 + static_cast<int>(random() % 20));
    for (LayerCost& cost : costs) cost.gradient_bytes = random() % 4 ? cost.weight_bytes : 0;
    if (round % 3 == 0) costs[costs.size() / 2].forward_ms *= 4;
    const Cluster cluster = cluster_of(2 + static_cast<int>(random() % 7), 1);
    SearchOptions tight = options_of(2 + static_cast<int>(random() % 15), random() % 3 > 0, 4'000'000);
    tight.plan.gradient_groups = 1;
    tight.max_traffic = 1.25;
    tight.interleave = false;
    const auto step_ms = [&](const SearchOptions& options) {
      return search(costs, cluster, options).front().rating.step_ms * (1 - kTie);
    };
    const double least_ms = search(costs, cluster, tight).front().rating.step_ms;
    SearchOptions loose = tight;
    loose.max_traffic = 2;
    CHECK(step_ms(loose) <= least_ms);
    loose.max_traffic = 0;
    loose.interleave = true;
    CHECK(step_ms(loose) <= least_ms);
    loose.plan.gradient_groups = 2 + static_cast<int>(random() % 6);
    CHECK(step_ms(loose) <= least_ms);
    loose.max_fused_layers = 3;
    CHECK(step_ms(loose) <= least_ms);
    SearchOptions one_device_each = tight;
    one_device_each.replicas = false;
    CHECK(least_ms * (1 - kTie) <= search(costs, cluster, one_device_each).front().rating.step_ms);
  }
}

TEST_CASE("search: never worse than the cuts that are known, if they keep the limits") {
  std::mt19937 random(20);
  int better = 0;
  for (int round = 0; round < rounds(2, 5); ++round) {
    CAPTURE(round);
    const LayerCosts costs = costs_of_a_search(random, 24 + round);
    SearchOptions options = options_of(12, round % 2 == 0, 10'000'000);
    options.max_fused_layers = 4;
    const PlanChoice known = search(costs, cluster_of(6, 1), options).front();
    options.effort = 400'000;
    const double alone_ms = search(costs, cluster_of(6, 1), options).front().rating.step_ms;
    options.starts = {known.cut};
    const double started_ms = search(costs, cluster_of(6, 1), options).front().rating.step_ms;
    CHECK(started_ms * (1 - kTie) <= known.rating.step_ms);
    better += started_ms < alone_ms;

    SearchOptions tight = options;
    tight.replicas = tight.interleave = false;
    tight.max_fused_layers = 1;
    tight.starts = {known.cut};
    for (const PlanChoice& choice : search(costs, cluster_of(6, 1), tight)) {
      CHECK(choice.cut.interleave == 1);
      CHECK(choice.cut.backward.front().layers.size() == 1);
      for (const CutStage& stage : choice.cut.forward) CHECK(stage.replicas == 1);
      for (const CutStage& stage : choice.cut.backward) CHECK(stage.replicas == 1);
    }
  }
  CHECK(better > 0);
}

TEST_CASE("search: more effort than the default is other random numbers, and never gives a worse plan") {
  std::mt19937 random(23);
  int better = 0;
  for (int round = 0; round < rounds(1, 3); ++round) {
    CAPTURE(round);
    const LayerCosts costs = costs_of_a_search(random, 24 + round);
    SearchOptions options = options_of(12, false, SearchOptions{}.effort);
    options.max_traffic = 2;
    const double once_ms = search(costs, cluster_of(6, 1), options).front().rating.step_ms;
    options.effort *= rounds(2, 3);
    const double longer_ms = search(costs, cluster_of(6, 1), options).front().rating.step_ms;
    CHECK(longer_ms * (1 - kTie) <= once_ms);
    better += longer_ms < once_ms;
  }
  CHECK(better > 0);
}

TEST_CASE("search: devices of unequal memory get what fits beside the job before") {
  std::mt19937 random(17);
  int uneven = 0;
  for (int round = 0; round < rounds(8, 25); ++round) {
    CAPTURE(round);
    LayerCosts costs;
    for (int layer = 0; layer < 6 + static_cast<int>(random() % 20); ++layer) {
      const std::int64_t weights = 500 + static_cast<std::int64_t>(random() % 3500);
      costs.push_back({.forward_ms = 10,
                       .backward_ms = 20 + static_cast<double>(random() % 10),
                       .weight_bytes = weights,
                       .gradient_bytes = weights,
                       .activation_bytes = 50,
                       .saved_bytes = 200});
    }
    Cluster cluster = cluster_of(3, 1);
    for (const int device : {0, 1, 2})
      cluster.devices[static_cast<std::size_t>(device)].memory_bytes =
          1000 * std::vector{24, 16, 12}[static_cast<std::size_t>(device)];
    const SearchOptions options = options_of(4, round % 2 == 0, 2'000'000);
    const CostSums sums(costs);
    const PlanChoice best = search(costs, cluster, options).front();
    Placer placer(best.recipe, costs, cluster, options.rules);
    std::vector<const Job*> last(3, nullptr);
    std::vector<Plan> plans;
    for (int step = 0; step < 20; ++step) plans.push_back(placer.next());
    CHECK(placer.crowded() == 0);
    for (std::size_t device = 0; device < 3; ++device) {
      // A device runs its jobs by step + order.
      std::vector<std::pair<double, const Job*>> jobs;
      for (std::size_t step = 0; step < plans.size(); ++step) {
        for (const Job& job : plans[step].jobs) {
          if (job.device == static_cast<int>(device)) jobs.emplace_back(static_cast<double>(step) + job.order, &job);
        }
      }
      std::ranges::stable_sort(jobs, {}, [](const auto& entry) { return entry.first; });
      const std::int64_t room = cluster.devices[device].memory_bytes;
      for (std::size_t i = 0; i < jobs.size(); ++i) {
        const Job& job = *jobs[i].second;
        std::int64_t bytes = 2 * 50 + (job.layers.first > 0 ? 2 * 50 : 0);
        for (int layer = job.layers.first; layer < job.layers.last; ++layer) {
          const LayerCost& cost = costs[static_cast<std::size_t>(layer)];
          bytes += cost.weight_bytes + (job.phase == Phase::kForward ? 0 : cost.gradient_bytes + cost.saved_bytes);
        }
        REQUIRE(bytes <= room);
        if (i + 1 == jobs.size()) continue;
        const std::int64_t next = sums.weight_bytes(jobs[i + 1].second->layers);
        REQUIRE((bytes + next <= room || job.layers.size() == 1));
        if (bytes + next > 12'000) ++uneven;
      }
    }
  }
  CHECK(uneven > 0);  // the larger devices take more
}

TEST_CASE("search: the predicted synchronous step is what the plan takes") {
  std::mt19937 random(12);
  for (int round = 0; round < rounds(20, 60); ++round) {
    const LayerCosts costs = costs_of_a_search(random, 2 + static_cast<int>(random() % 20));
    const double hop_ms = static_cast<double>(random() % 3);
    const Cluster cluster = cluster_of(1 + static_cast<int>(random() % 8), hop_ms);
    const SearchOptions options = options_of(1 + static_cast<int>(random() % 16), false, 200'000);
    const PlanChoice best = search(costs, cluster, options).front();
    Placer placer(best.recipe, costs, cluster, options.rules);
    REQUIRE(makespan_ms(placer.next(), costs, hop_ms) == doctest::Approx(best.rating.step_ms));
  }
}

TEST_CASE("search: never worse than the greedy plan, on uneven layers of many sizes") {
  std::mt19937 random(13);
  for (int round = 0; round < rounds(8, 60); ++round) {
    const LayerCosts costs = costs_of_a_search(random, 8 + static_cast<int>(random() % 40));
    const Cluster cluster = cluster_of(2 + static_cast<int>(random() % 7), 1);
    SearchOptions options = options_of(2 + static_cast<int>(random() % 15), random() % 2 == 0, 300'000);
    options.max_fused_layers = static_cast<int>(costs.size());
    const CostSums sums(costs);
    const int devices = static_cast<int>(cluster.devices.size());
    const Plan greedy = to_recipe(to_cut(greedy_stages(costs, devices, options.plan)), sums, devices, options.plan);
    const double greedy_ms = rate(greedy, costs, cluster, options.rules, 97).step_ms;
    REQUIRE(search(costs, cluster, options).front().rating.step_ms <= greedy_ms * (1 + kTie));
  }
}

namespace {

// Every cut of a few layers whose fused stage is the last layer.
std::vector<Cut> every_cut(int layers) {
  const auto stages_of = [](int first, int last, unsigned cuts) {
    std::vector<CutStage> stages{{{first, first + 1}, 1}};
    for (int layer = first + 1; layer < last; ++layer) {
      if ((cuts >> (layer - first - 1)) & 1U) {
        stages.push_back({{layer, layer + 1}, 1});
      } else {
        ++stages.back().layers.last;
      }
    }
    return stages;
  };
  std::vector<Cut> all;
  for (unsigned forward = 0; forward < (1U << (layers - 2)); ++forward) {
    for (unsigned backward = 0; backward < (1U << (layers - 2)); ++backward) {
      Cut cut;
      cut.forward = stages_of(0, layers - 1, forward);
      cut.backward = stages_of(0, layers - 1, backward);
      cut.backward.push_back({{layers - 1, layers}, 1});
      std::ranges::reverse(cut.backward);
      all.push_back(cut);
    }
  }
  return all;
}

}  // namespace

TEST_CASE("search: tiny cases against every plan without replicas") {
  std::mt19937 random(14);
  for (int round = 0; round < 100; ++round) {
    CAPTURE(round);
    const bool limited = round >= 40 && round < 80, single = round >= 80;
    const int layers = 2 + static_cast<int>(random() % 4), devices = 1 + static_cast<int>(random() % 3);
    LayerCosts costs = costs_of_a_search(random, layers);
    const Cluster cluster = cluster_of(devices);
    SearchOptions options = options_of(1 + static_cast<int>(random() % 4), false, 40'000'000);
    options.replicas = false;
    options.plan.single_backward_layers = single;
    const int microbatches = options.plan.microbatches;
    if (limited) {
      for (LayerCost& cost : costs) cost.activation_bytes = 100 + static_cast<std::int64_t>(random() % 900);
      options.max_waiting_bytes = microbatches * (200 + static_cast<std::int64_t>(random() % 3000));
    }
    const CostSums sums(costs);
    double least_ms = 1e300;
    for (const Cut& cut : every_cut(layers)) {
      std::int64_t waiting = 0;
      for (const CutStage& stage : cut.backward) {
        if (stage.layers.first > 0)
          waiting += microbatches * costs[static_cast<std::size_t>(stage.layers.first) - 1].activation_bytes;
      }
      if (limited && waiting > options.max_waiting_bytes) continue;
      if (single && cut.backward.size() < static_cast<std::size_t>(layers)) continue;
      const Plan recipe = to_recipe(cut, sums, devices, options.plan);
      least_ms = std::min(least_ms, rate(recipe, costs, cluster, options.rules, 1).step_ms);
    }
    if (least_ms == 1e300) {
      REQUIRE_THROWS_AS(search(costs, cluster, options), HostTooSmall);
      continue;
    }
    const double found_ms = search(costs, cluster, options).front().rating.step_ms;
    REQUIRE(found_ms >= least_ms * (1 - 1e-9));
    REQUIRE(found_ms <= least_ms * (1 + kTie));
  }
}

TEST_CASE("search: devices that share gradient groups keep all layers, or as many as fit") {
  std::mt19937 random(12);
  for (const int devices : {2, 3, 4}) {
    LayerCosts costs = costs_of_a_search(random, 21);
    for (LayerCost& cost : costs) cost.gradient_bytes = cost.saved_bytes = 1000;
    for (const bool asynchronous : {false, true}) {
      CAPTURE(devices);
      CAPTURE(asynchronous);
      SearchOptions options = options_of(2 * devices, asynchronous, 20'000'000);
      options.plan.gradient_groups = 2 * devices;
      options.max_fused_layers = 21;
      double kept_ms = 0, recomputed_ms = 0;
      for (const LayerCost& cost : costs) {
        kept_ms += cost.forward_ms + cost.backward_ms;
        recomputed_ms += cost.forward_ms;
      }
      const auto step_ms = [&](const Cluster& cluster) {
        return search(costs, cluster, options).front().rating.step_ms;
      };
      CHECK(step_ms(cluster_of(devices)) <= 2 * kept_ms * (1 + kTie));
      Cluster tight = cluster_of(devices);
      const CostSums sums(costs);
      for (ClusterDevice& device : tight.devices) device.memory_bytes = sums.visit_bytes({9, 21}, true) + 2000;
      // A dozen of 21 layers fit at most; with half of them kept, half of the recompute is left.
      CHECK(step_ms(tight) <= 2 * (kept_ms + 0.6 * recomputed_ms) * 1.03);
    }
  }
}

TEST_CASE("search: backward stages of one layer each, but the fused one") {
  std::mt19937 random(29);
  for (int round = 0; round < 16; ++round) {
    CAPTURE(round);
    const int layers = 3 + static_cast<int>(random() % 30);
    const LayerCosts costs = costs_of_a_search(random, layers);
    const Cluster cluster = cluster_of(1 + static_cast<int>(random() % 5), 1);
    SearchOptions options = options_of(1 + static_cast<int>(random() % 9), random() % 2 == 0, 400'000);
    options.max_fused_layers = 1 + static_cast<int>(random() % 3);
    const bool fused = random() % 4 > 0;
    options.plan.mode = fused ? PlanMode::kFused : PlanMode::kTrain;
    options.plan.gradient_groups = options.plan.microbatches;
    const int lowest = options.plan.first_backward_layer = static_cast<int>(random() % 3);
    options.plan.single_backward_layers = true;
    for (const PlanChoice& choice : search(costs, cluster, options)) {
      validate(choice.recipe, options.plan.mode);
      const std::vector<CutStage>& stages = choice.cut.backward;
      const std::size_t first = fused ? 1 : 0;
      const int end = fused ? stages.front().layers.first : layers;
      CHECK(stages.size() == first + static_cast<std::size_t>(end - std::min(lowest, end)));
      for (std::size_t i = first; i < stages.size(); ++i) CHECK(stages[i].layers.size() == 1);
      CHECK(choice.limit != "device memory");
    }
  }
}

TEST_CASE("search: no more waits on the host than may, down to what the devices allow") {
  std::mt19937 random(24);
  for (int round = 0; round < rounds(5, 60); ++round) {
    CAPTURE(round);
    const int layers = 6 + static_cast<int>(random() % 40);
    LayerCosts costs = costs_of_a_search(random, layers);
    for (LayerCost& cost : costs) {
      cost.activation_bytes = 100;
      cost.saved_bytes = 500;
    }
    Cluster cluster = cluster_of(1 + static_cast<int>(random() % 8), 1);
    const bool limited = random() % 2 == 0;
    for (ClusterDevice& device : cluster.devices) device.memory_bytes = limited ? 12'000 : 0;
    SearchOptions options = options_of(2 + static_cast<int>(random() % 15), random() % 2 == 0, 400'000);
    const CostSums sums(costs);
    const auto waiting = [&](const PlanChoice& choice) {
      return waiting_bytes(choice.cut, sums, options.plan.microbatches);
    };
    const PlanChoice free = search(costs, cluster, options).front();
    options.max_waiting_bytes = waiting(free);
    const PlanChoice same = search(costs, cluster, options).front();
    CHECK(waiting(same) <= options.max_waiting_bytes);
    for (std::int64_t limit = waiting(free) - 1;;) {
      options.max_waiting_bytes = limit;
      try {
        const std::vector<PlanChoice> found = search(costs, cluster, options);
        for (const PlanChoice& choice : found) {
          REQUIRE(waiting(choice) <= limit);
          validate(choice.recipe, PlanMode::kFused);
        }
        limit = waiting(found.front()) / 2;
        if (limit == 0) break;
      } catch (const HostTooSmall& error) {
        CHECK(std::string(error.what()).find("expected at most " + std::to_string(limit)) != std::string::npos);
        // Two stages, the head and all other layers, leave the head's inputs waiting.
        const std::int64_t least = options.plan.microbatches * 100;
        CHECK((limited || limit < least));
        break;
      }
    }
  }
}

TEST_CASE("search: devices of unequal speed are used to the sum of their speeds") {
  const LayerCosts costs(32, {.forward_ms = 10, .backward_ms = 20});
  Cluster cluster = cluster_of(4, 0.5);
  cluster.devices[2].speed = cluster.devices[3].speed = 0.5;
  CHECK(search(costs, cluster, options_of(16, true, 10'000'000)).front().rating.bubble < 0.05);
}

TEST_CASE("search: bad input") {
  using doctest::Contains;
  LayerCosts costs(4, {.forward_ms = 1, .backward_ms = 2, .weight_bytes = 100});
  Cluster cluster = cluster_of(2);
  CHECK_THROWS_WITH_AS(search({}, cluster, options_of(4, true, 1000)), Contains("no layers"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(search(costs, cluster, options_of(0, true, 1000)), Contains("microbatches"),
                       std::invalid_argument);
  costs[2].forward_ms = -1;
  CHECK_THROWS_WITH_AS(search(costs, cluster, options_of(4, true, 1000)), Contains("costs[2].forward_ms"),
                       std::invalid_argument);
  costs[2].forward_ms = 1e300;
  CHECK_THROWS_WITH_AS(search(costs, cluster, options_of(4, true, 1000)),
                       Contains("costs[2].forward_ms is 1e+300, expected a number"), std::invalid_argument);
  costs[2] = costs[0];
  costs[3].weight_bytes = 5000;
  cluster.devices[0].memory_bytes = 1000;
  cluster.devices[1].memory_bytes = 2000;
  CHECK_THROWS_WITH_AS(search(costs, cluster, options_of(4, true, 1000)), Contains("costs[3] needs 5000 bytes"),
                       std::invalid_argument);
  cluster = cluster_of(2);
  SearchOptions options = options_of(4, true, 1000);
  options.plan.gradient_groups = -1;
  CHECK_THROWS_WITH_AS(search(costs, cluster, options), Contains("gradient_groups is -1"), std::invalid_argument);
  options.plan.gradient_groups = 0;
  options.max_traffic = 0.01;
  CHECK_THROWS_WITH_AS(search(costs, cluster, options), Contains("max_traffic"), std::invalid_argument);
}
