#include <roundpipe/simulate/node_exchange.h>

#include <algorithm>
#include <limits>
#include <map>
#include <random>
#include <stdexcept>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/simulate/link_simulator.h>

using namespace roundpipe::schedule;
using namespace roundpipe::simulate;

namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr std::int64_t kMB = 1'000'000;  // one millisecond at 1 GB/s

using Table = std::vector<std::vector<double>>;  // [step][layer]

// The rules once more, slow and obvious: everything that has to be done is written down with what it comes after, and
// at each moment all of it is asked whether it goes on.
struct Task {
  enum Kind { kLanding, kLatency, kBytes, kUpdate } kind = kLatency;
  double left = 0;  // milliseconds or bytes
  std::vector<std::size_t> after;
  std::size_t rank = 0;  // of an update: lower ones first
  double ended_ms = kNever;
  bool running = false;
};

class Naive {
 public:
  Naive(const LayerCosts& costs, const Table& landings_ms, const NodeRules& rules, double update_gb_per_s)
      : rules_(rules) {
    const double part = 1.0 / rules.nodes;
    std::vector<std::size_t> gradients, weights;  // the latest of each channel
    for (std::size_t step = 0; step < landings_ms.size(); ++step) {
      std::map<std::size_t, std::size_t> exchanged, updates;  // by layer
      for (std::size_t layer = costs.size(); layer-- > 0;) {
        if (landings_ms[step][layer] == kNever) continue;
        const std::size_t landing = add(Task::kLanding, landings_ms[step][layer], {});
        exchanged[layer] = landing;
        if (rules.nodes == 1 || !trains(costs[layer])) continue;
        const double bytes = static_cast<double>(costs[layer].gradient_bytes) * (1 - part);
        gradients.push_back(landing);
        const std::size_t header = add(Task::kLatency, rules.latency_ms, gradients);
        const std::size_t payload = add(Task::kLatency, rules.latency_ms, {header});
        gradients = {exchanged[layer] = add(Task::kBytes, bytes, {payload})};
      }
      std::vector<std::size_t> norm;
      for (const auto& [layer, task] : exchanged) {
        if (trains(costs[layer])) norm.push_back(task);
      }
      if (rules.clipped && rules.nodes > 1 && !norm.empty())
        norm = gradients = {add(Task::kLatency, rules.latency_ms, norm)};
      for (const auto& [layer, task] : exchanged) {
        std::vector<std::size_t> after{task};
        if (rules.clipped && trains(costs[layer])) after.insert(after.end(), norm.begin(), norm.end());
        const double bytes = static_cast<double>(costs[layer].updated_bytes()) * part;
        const double ms = update_gb_per_s > 0 ? bytes / update_gb_per_s / 1e6 : 0;
        updates[layer] = add(Task::kUpdate, ms, after);
        tasks_.back().rank = step * costs.size() + layer;
      }
      published_.emplace_back(updates);
      std::vector<std::pair<std::size_t, std::size_t>> in_turn(updates.begin(), updates.end());
      if (rules.at_once) std::ranges::reverse(in_turn);
      for (const auto& [layer, update] : in_turn) {
        if (rules.nodes == 1 || !trains(costs[layer])) continue;
        const double bytes = static_cast<double>(costs[layer].updated_bytes()) * (1 - part);
        weights.push_back(update);
        const std::size_t latency = add(Task::kLatency, rules.latency_ms, weights);
        weights = {published_.back()[layer] = add(Task::kBytes, bytes, {latency})};
      }
    }
  }

  // When each layer is published.
  Table run() {
    while (begin()) {
      double next_ms = kNever;
      for (const Task& task : tasks_) {
        if (task.running) next_ms = std::min(next_ms, now_ms_ + task.left / rate(task));
      }
      if (next_ms == kNever) break;
      std::vector<double> moved;
      for (const Task& task : tasks_) moved.push_back(task.running ? rate(task) * (next_ms - now_ms_) : 0);
      const bool moves = std::ranges::any_of(tasks_, [](const Task& t) { return t.running && t.kind == Task::kBytes; });
      if (moves) busy_ms += next_ms - now_ms_;
      now_ms_ = next_ms;
      for (std::size_t i = 0; i < tasks_.size(); ++i) {
        if (!tasks_[i].running) continue;
        tasks_[i].left -= moved[i];
        if (tasks_[i].left <= (tasks_[i].kind == Task::kBytes ? 1e-3 : 1e-9)) end(tasks_[i]);
      }
    }
    Table result;
    for (const auto& step : published_) {
      auto& row = result.emplace_back();
      for (const auto& [layer, task] : step) row.push_back(tasks_[task].ended_ms);
    }
    return result;
  }
  double busy_ms = 0;

 private:
  static bool trains(const LayerCost& cost) { return cost.trained || cost.updated_bytes() > 0; }

  std::size_t add(Task::Kind kind, double left, std::vector<std::size_t> after) {
    tasks_.push_back({.kind = kind, .left = left, .after = std::move(after)});
    return tasks_.size() - 1;
  }
  double rate(const Task& task) const {
    if (task.kind != Task::kBytes) return 1;
    const auto sharing =
        std::ranges::count_if(tasks_, [](const Task& t) { return t.running && t.kind == Task::kBytes; });
    return rules_.network_gb_per_s * 1e6 / static_cast<double>(sharing);
  }
  void end(Task& task) {
    task.running = false;
    task.ended_ms = now_ms_;
  }
  // Starts what can start; false if nothing runs.
  bool begin() {
    for (bool again = true; again;) {
      again = false;
      Task* update = nullptr;
      for (Task& task : tasks_) {
        if (task.running || task.ended_ms < kNever) continue;
        if (!std::ranges::all_of(task.after, [&](std::size_t i) { return tasks_[i].ended_ms < kNever; })) continue;
        if (task.kind == Task::kUpdate) {
          if (update == nullptr || task.rank < update->rank) update = &task;
          continue;
        }
        task.running = true;
        if (task.left > 0 && !(task.kind == Task::kBytes && rules_.network_gb_per_s == 0)) continue;
        end(task);
        again = true;
      }
      const bool busy = std::ranges::any_of(tasks_, [](const Task& t) { return t.running && t.kind == Task::kUpdate; });
      if (again || busy || update == nullptr) continue;
      update->running = true;
      if (update->left > 0) continue;
      end(*update);
      again = true;
    }
    return std::ranges::any_of(tasks_, [](const Task& task) { return task.running; });
  }

  const NodeRules rules_;
  std::vector<Task> tasks_;
  std::vector<std::map<std::size_t, std::size_t>> published_;  // [step]: the last task of each layer
  double now_ms_ = 0;
};

struct Exchanged {
  Table published_ms;
  double busy_ms = 0;
};

// Lands gradients at these times; kNever: none is expected.
Exchanged exchange(const LayerCosts& costs, const Table& landings_ms, const NodeRules& rules,
                   double update_gb_per_s = 0) {
  std::vector<char> expected;
  for (const auto& step : landings_ms) {
    for (const double ms : step) expected.push_back(ms < kNever ? 1 : 0);
  }
  NodeExchange exchange(costs, expected, rules, update_gb_per_s);
  Exchanged result;
  result.published_ms.assign(landings_ms.size(), std::vector<double>(costs.size(), kNever));
  double now_ms = -1;
  while (true) {
    double next_ms = exchange.next_ms();
    for (const auto& step : landings_ms) {
      for (const double ms : step) next_ms = ms > now_ms ? std::min(next_ms, ms) : next_ms;
    }
    if (next_ms == kNever) break;
    for (std::size_t step = 0; step < landings_ms.size(); ++step) {
      for (std::size_t layer = 0; layer < costs.size(); ++layer) {
        const double ms = landings_ms[step][layer];
        if (ms > now_ms && ms <= next_ms) exchange.land(step, layer);
      }
    }
    now_ms = next_ms;
    exchange.run(now_ms);
    for (std::size_t step = 0; step < landings_ms.size(); ++step) {
      for (std::size_t layer = 0; layer < costs.size(); ++layer) {
        double& ms = result.published_ms[step][layer];
        if (ms == kNever && exchange.published(step, layer)) ms = now_ms;
      }
    }
  }
  result.busy_ms = exchange.network_busy_ms();
  return result;
}

LayerCosts layers_of(std::vector<std::int64_t> megabytes) {
  LayerCosts costs;
  for (const std::int64_t size : megabytes)
    costs.push_back({.forward_ms = 1, .backward_ms = 2, .weight_bytes = size * kMB, .gradient_bytes = size * kMB});
  return costs;
}

}  // namespace

TEST_CASE("exchange: one layer after the other, by hand") {
  // Two nodes: half of a layer's bytes move. At 1 GB/s, 8 MB take 4 ms.
  const LayerCosts costs = layers_of({8, 8});
  const NodeRules rules{.nodes = 2, .network_gb_per_s = 1, .latency_ms = 1};
  // Gradients: the last layer from 10 to 16 (header, payload, 4 ms), the first to 22. Weights: latency and 4 ms each.
  const Exchanged got = exchange(costs, {{12, 10}}, rules);
  CHECK(got.published_ms[0] == std::vector<double>{27, 32});
  CHECK(got.busy_ms == 16);
  // Half of a layer is updated: 4 MB take 2 ms. The first layer's update is over at 24.
  CHECK(exchange(costs, {{12, 10}}, rules, 2).published_ms[0] == std::vector<double>{29, 34});
  // With clipping, the norm is known at 23: the first layer is updated at 25, the last at 27.
  NodeRules clipped = rules;
  clipped.clipped = true;
  CHECK(exchange(costs, {{12, 10}}, clipped, 2).published_ms[0] == std::vector<double>{30, 35});
}

TEST_CASE("exchange: the first layer's gradient waits for the last layer's, and its weights for the lowest") {
  const LayerCosts costs = layers_of({8, 8});
  const NodeRules rules{.nodes = 2, .network_gb_per_s = 1};
  const Exchanged got = exchange(costs, {{0, 10}}, rules);
  CHECK(got.published_ms[0] == std::vector<double>{22, 26});  // gradients 10 to 18, weights 18 to 26
  // At once, those of the last layer go from 14 on, at half the rate, until its gradients have moved at 18.
  NodeRules at_once = rules;
  at_once.at_once = true;
  CHECK(exchange(costs, {{0, 10}}, at_once).published_ms[0] == std::vector<double>{26, 22});
}

TEST_CASE("exchange: gradients of a step and weights of the last share the network evenly") {
  const LayerCosts costs = layers_of({8});
  const NodeRules rules{.nodes = 2, .network_gb_per_s = 1};
  // Gradients 0 to 4. From 4 on, weights and the next gradients at half the rate: both until 12, then weights to 16.
  const Exchanged got = exchange(costs, {{0}, {4}}, rules);
  CHECK(got.published_ms == Table{{12}, {16}});
  CHECK(got.busy_ms == 16);
}

TEST_CASE("exchange: one node sends nothing, and clipping makes its updates wait") {
  const LayerCosts costs = layers_of({8, 8});
  NodeRules rules{.network_gb_per_s = 1, .latency_ms = 5};
  CHECK(exchange(costs, {{12, 10}}, rules, 1).published_ms[0] == std::vector<double>{26, 18});
  CHECK(exchange(costs, {{12, 10}}, rules).published_ms[0] == std::vector<double>{12, 10});
  rules.clipped = true;
  const Exchanged got = exchange(costs, {{12, 10}}, rules, 1);
  CHECK(got.published_ms[0] == std::vector<double>{20, 28});
  CHECK(got.busy_ms == 0);
}

TEST_CASE("exchange: frozen layers do not travel, of adapters only what trains") {
  LayerCosts costs = layers_of({8, 8, 8});
  costs[0].trained = false;
  costs[0].gradient_bytes = 0;
  costs[1].gradient_bytes = 2 * kMB;
  const NodeRules rules{.nodes = 2, .network_gb_per_s = 1, .latency_ms = 1};
  // The last layer from 0 to 6 and the adapter from 6 to 9; then its weights to 11 and the last layer's to 16.
  const Exchanged got = exchange(costs, {{3, 2, 0}}, rules);
  CHECK(got.published_ms[0] == std::vector<double>{3, 11, 16});
  // A layer of which no gradient is expected is new from the start.
  NodeExchange none(costs, {0, 1, 1}, rules, 0);
  CHECK(none.published(0, 0));
  CHECK_FALSE(none.published(0, 1));
}

TEST_CASE("exchange: as the obvious reference, for any rules") {
  std::mt19937 random(17);
  const auto upto = [&](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
  for (int round = 0; round < 300; ++round) {
    LayerCosts costs;
    const int layers = 1 + upto(6);
    for (int layer = 0; layer < layers; ++layer) {
      const std::int64_t size = (1 + upto(40)) * kMB / 7;
      const bool trains = upto(4) > 0;
      costs.push_back({.weight_bytes = size, .gradient_bytes = trains ? size / (1 + upto(2)) : 0, .trained = trains});
      if (trains && upto(5) == 0) costs.back().gradient_bytes = 0;
    }
    NodeRules rules{.nodes = 1 + upto(6), .network_gb_per_s = upto(4) * 0.7, .latency_ms = upto(3) * 0.25};
    rules.clipped = upto(2) == 0;
    rules.at_once = !rules.clipped && upto(2) == 0;
    const double update_gb_per_s = upto(3) * 0.9;
    Table landings_ms;
    const int first = upto(layers);  // layers below it have no gradient
    for (int step = 0; step < 1 + upto(4); ++step) {
      auto& row = landings_ms.emplace_back(static_cast<std::size_t>(layers), kNever);
      double ms = step * 11;
      for (int layer = layers; layer-- > first;) row[static_cast<std::size_t>(layer)] = ms += upto(5) * 0.75;
    }
    CAPTURE(round);
    Naive naive(costs, landings_ms, rules, update_gb_per_s);
    const Table expected_ms = naive.run();
    const Exchanged got = exchange(costs, landings_ms, rules, update_gb_per_s);
    CHECK(got.busy_ms == doctest::Approx(naive.busy_ms));
    for (std::size_t step = 0; step < landings_ms.size(); ++step) {
      for (std::size_t layer = static_cast<std::size_t>(first); layer < costs.size(); ++layer)
        REQUIRE(got.published_ms[step][layer] ==
                doctest::Approx(expected_ms[step][layer - static_cast<std::size_t>(first)]));
    }
  }
}

TEST_CASE("exchange: rules out of range are refused by name") {
  const LayerCosts costs = layers_of({8});
  CHECK_THROWS_WITH_AS(NodeExchange(costs, {1}, {.nodes = 0}, 0), "[nodes] nodes is 0, expected at least 1",
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(NodeExchange(costs, {1}, {.network_gb_per_s = -1}, 0),
                       "[nodes] network_gb_per_s is -1, expected a finite number from 0 up", std::invalid_argument);
  CHECK_THROWS_AS(NodeExchange(costs, {1}, {.latency_ms = kNever}, 0), std::invalid_argument);
  CHECK_THROWS_AS(NodeExchange(costs, {1}, {}, -1), std::invalid_argument);
}

namespace {

// `layers` equal layers, each a stage, on one device: forwards, the last one fused, backwards.
Plan chain(int layers) {
  Plan plan{layers, 1, 1, 0, {}};
  for (int layer = 0; layer + 1 < layers; ++layer)
    plan.jobs.push_back({Phase::kForward, {layer, layer + 1}, {0, 1}, 0});
  plan.jobs.push_back({Phase::kFused, {layers - 1, layers}, {0, 1}, 0});
  for (int layer = layers - 1; layer-- > 0;) plan.jobs.push_back({Phase::kBackward, {layer, layer + 1}, {0, 1}, 0});
  return plan;
}

LinkTimeline steps_of(const LayerCosts& costs, NodeRules nodes, bool asynchronous, double update_gb_per_s = 0) {
  Cluster cluster;
  cluster.devices.resize(1);
  const std::vector<Plan> plans(60, chain(static_cast<int>(costs.size())));
  LinkRules rules;
  rules.timing.asynchronous = asynchronous;
  rules.update.gb_per_s = update_gb_per_s;
  rules.nodes = nodes;
  LinkTimeline timeline = simulate_links(plans, costs, cluster, rules);
  check(timeline.timeline, plans, rules.timing);
  return timeline;
}

}  // namespace

TEST_CASE("nodes: a fast network leaves the step of one node") {
  // 6 layers of 1 + 1 + 2 ms and 8 MB; the last recomputes nothing: 23 ms. Two nodes move 24 + 24 MB a step each way.
  const LayerCosts costs = layers_of({8, 8, 8, 8, 8, 8});
  const double one_ms = steps_of(costs, {}, true).timeline.steady_step_ms;
  CHECK(one_ms == doctest::Approx(23));
  const LinkTimeline two = steps_of(costs, {.nodes = 2, .network_gb_per_s = 10}, true);
  CHECK(two.timeline.steady_step_ms == doctest::Approx(one_ms));
  CHECK(two.network_busy_ms == doctest::Approx(60 * 4.8));
  // A synchronous step waits for the last layers: the gradient of the first lands at 23, moves 0.4 ms, and its weights
  // 0.4 ms more. The others follow faster than the forward reads them.
  const LinkTimeline in_turn = steps_of(costs, {.nodes = 2, .network_gb_per_s = 10}, false);
  CHECK(in_turn.timeline.steady_step_ms == doctest::Approx(23.8));
}

TEST_CASE("nodes: a slow network is the step, whatever else there is") {
  const LayerCosts costs = layers_of({8, 8, 8, 8, 8, 8});
  for (const int nodes : {2, 4, 16}) {
    // All gradients and all weights, less the node's own part, at 0.25 GB/s.
    const double bytes = 2 * 48e6 * (nodes - 1) / nodes;
    const LinkTimeline got = steps_of(costs, {.nodes = nodes, .network_gb_per_s = 0.25}, true);
    CHECK(got.timeline.steady_step_ms == doctest::Approx(bytes / 0.25e6).epsilon(0.01));
    CHECK(got.network_busy_ms == doctest::Approx(60 * bytes / 0.25e6));
  }
}

TEST_CASE("nodes: each updates its part, so a slow optimizer is faster on more of them") {
  const LayerCosts costs = layers_of({8, 8, 8, 8, 8, 8});
  const double one_ms = steps_of(costs, {}, true, 0.5).timeline.steady_step_ms;
  CHECK(one_ms == doctest::Approx(96));
  const double two_ms = steps_of(costs, {.nodes = 2}, true, 0.5).timeline.steady_step_ms;
  CHECK(two_ms == doctest::Approx(48));
  CHECK(steps_of(costs, {.nodes = 8}, true, 0.5).timeline.steady_step_ms == doctest::Approx(23));
}
