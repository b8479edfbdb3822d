#include <roundpipe/schedule/plan.h>

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/schedule/costs.h>

using namespace roundpipe::schedule;

namespace {

// Four layers, two microbatches, two devices; stages [0, 1) [1, 3) forward, [3, 4) fused, [2, 3) [0, 2) backward.
Plan fused_plan() {
  return {4,
          2,
          2,
          0,
          {{Phase::kForward, {0, 1}, {0, 2}, 0},
           {Phase::kForward, {1, 3}, {0, 2}, 1},
           {Phase::kFused, {3, 4}, {0, 2}, 0},
           {Phase::kBackward, {2, 3}, {0, 2}, 1},
           {Phase::kBackward, {0, 2}, {0, 2}, 0}}};
}

Plan train_plan() {
  return {2,
          2,
          2,
          0,
          {{Phase::kForward, {0, 1}, {0, 2}, 0},
           {Phase::kForward, {1, 2}, {0, 1}, 1},
           {Phase::kForward, {1, 2}, {1, 2}, 0},
           {Phase::kBackward, {0, 2}, {0, 2}, 1}}};
}

// The message that refuses `plan`; empty if it is accepted.
std::string refusal(const Plan& plan, PlanMode mode) {
  try {
    validate(plan, mode);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

#define CHECK_REFUSED(plan, mode, text)              \
  do {                                               \
    const std::string message = refusal(plan, mode); \
    INFO("message: ", message);                      \
    CHECK(message.find("[validate] ") == 0);         \
    CHECK(message.find(text) != std::string::npos);  \
  } while (false)

}  // namespace

TEST_CASE("plan: backward jobs of several layers become single layers, on the same devices") {
  Plan plan{4, 2, 2, 0, {}};
  plan.jobs = {{Phase::kForward, {0, 3}, {0, 2}, 0, 0},
               {Phase::kFused, {3, 4}, {0, 2}, 1, 0.5},
               {Phase::kBackward, {1, 3}, {0, 1}, 0, 0.625},
               {Phase::kBackward, {1, 3}, {1, 2}, 1, 0.75},
               {Phase::kBackward, {0, 1}, {0, 2}, 0, 0.875}};
  const Plan cut = with_single_backward_layers(plan);
  validate(cut, PlanMode::kFused);
  const std::vector<Job> expected = {plan.jobs[0],
                                     plan.jobs[1],
                                     {Phase::kBackward, {2, 3}, {0, 1}, 0, 0.625},
                                     {Phase::kBackward, {1, 2}, {0, 1}, 0, 0.625},
                                     {Phase::kBackward, {2, 3}, {1, 2}, 1, 0.75},
                                     {Phase::kBackward, {1, 2}, {1, 2}, 1, 0.75},
                                     plan.jobs[4]};
  CHECK((cut.jobs == expected));
}

TEST_CASE("plan: range") {
  const Range range{2, 5};
  CHECK(range.size() == 3);
  CHECK(range.contains(2));
  CHECK(range.contains(4));
  CHECK_FALSE(range.contains(5));
  CHECK_FALSE(range.contains(1));
  CHECK(range == Range{2, 5});
  CHECK(to_string(range) == "[2, 5)");
}

TEST_CASE("plan: valid plans pass and tell their mode and stages") {
  CHECK(refusal(fused_plan(), PlanMode::kFused) == "");
  CHECK(refusal(train_plan(), PlanMode::kTrain) == "");
  CHECK(mode_of(fused_plan()) == PlanMode::kFused);
  CHECK(mode_of(train_plan()) == PlanMode::kTrain);
  CHECK(fused_plan().forward_stages() == std::vector<Range>{{0, 1}, {1, 3}});
  CHECK(fused_plan().backward_stages() == std::vector<Range>{{3, 4}, {2, 3}, {0, 2}});
  CHECK(train_plan().forward_stages() == std::vector<Range>{{0, 1}, {1, 2}});

  Plan inference = train_plan();
  inference.jobs.pop_back();
  CHECK(refusal(inference, PlanMode::kInference) == "");
  CHECK(mode_of(inference) == PlanMode::kInference);
  CHECK(inference.backward_stages().empty());
}

TEST_CASE("plan: replicas over microbatches, and stages that differ between them, are valid") {
  Plan plan{2, 3, 2, 0, {}};
  plan.jobs = {{Phase::kForward, {0, 1}, {0, 1}, 0},
               {Phase::kFused, {1, 2}, {0, 1}, 1},
               {Phase::kFused, {0, 2}, {1, 3}, 0},
               {Phase::kBackward, {0, 1}, {0, 1}, 1}};
  CHECK(refusal(plan, PlanMode::kFused) == "");
  const JobIndex index(plan);
  CHECK(index.forward(0, 0) == 0);
  CHECK(index.forward(0, 2) == 2);
  CHECK(index.backward(0, 0) == 3);
  CHECK(index.backward(0, 1) == 2);
  CHECK(index.backward(1, 0) == 1);
}

TEST_CASE("plan: backward may stop at the first layer that needs it") {
  Plan plan = fused_plan();
  plan.first_backward_layer = 2;
  CHECK_REFUSED(plan, PlanMode::kFused, "job 4 (backward, layers [0, 2), microbatches [0, 2), device 0) goes below");
  plan.jobs.pop_back();
  CHECK(refusal(plan, PlanMode::kFused) == "");
  CHECK(JobIndex(plan).backward(1, 0) == -1);
  plan.first_backward_layer = 1;
  CHECK_REFUSED(plan, PlanMode::kFused, "no job runs the backward of layer 1, microbatch 0");
  plan.first_backward_layer = 4;
  plan.jobs.pop_back();
  CHECK(refusal(plan, PlanMode::kFused) == "");
  CHECK(JobIndex(plan).backward(3, 0) == -1);
  plan.first_backward_layer = 5;
  CHECK_REFUSED(plan, PlanMode::kFused, "first_backward_layer is 5, expected 0 to 4");
}

TEST_CASE("plan: every job is needed, and where it stands") {
  for (auto [plan, mode] : {std::pair{fused_plan(), PlanMode::kFused}, std::pair{train_plan(), PlanMode::kTrain}}) {
    for (std::size_t i = 0; i < plan.jobs.size(); ++i) {
      Plan without = plan;
      without.jobs.erase(without.jobs.begin() + static_cast<std::ptrdiff_t>(i));
      CHECK(refusal(without, mode) != "");
      Plan twice = plan;
      twice.jobs.push_back(plan.jobs[i]);
      CHECK_REFUSED(twice, mode, "repeats the ");
    }
  }
  Plan plan = fused_plan();
  for (std::size_t i = 1; i < plan.jobs.size(); ++i) {
    Plan swapped = plan;
    std::swap(swapped.jobs[i - 1], swapped.jobs[i]);
    CHECK_REFUSED(swapped, PlanMode::kFused, "stands before the ");
  }
  // In train mode the loss needs the whole batch.
  Plan early{1, 2, 1, 0, {}};
  early.jobs = {{Phase::kForward, {0, 1}, {0, 1}, 0},
                {Phase::kBackward, {0, 1}, {0, 1}, 0},
                {Phase::kForward, {0, 1}, {1, 2}, 0},
                {Phase::kBackward, {0, 1}, {1, 2}, 0}};
  CHECK_REFUSED(early, PlanMode::kTrain, "stands before the forward of layer 0, microbatch 1");
}

TEST_CASE("plan: bad fields are named") {
  const auto with = [](auto change) {
    Plan plan = fused_plan();
    change(plan);
    return plan;
  };
  const auto mode = PlanMode::kFused;
  CHECK_REFUSED(with([](Plan& p) { p.layers = 0; }), mode, "plan.layers is 0");
  CHECK_REFUSED(with([](Plan& p) { p.microbatches = -1; }), mode, "plan.microbatches is -1");
  CHECK_REFUSED(with([](Plan& p) { p.devices = 0; }), mode, "plan.devices is 0");
  CHECK_REFUSED(with([](Plan& p) { p.jobs[1].device = 2; }), mode, "job 1 (forward, layers [1, 3), microbatches");
  CHECK_REFUSED(with([](Plan& p) { p.jobs[1].device = -1; }), mode, "bad device");
  CHECK_REFUSED(with([](Plan& p) { p.jobs[0].layers = {0, 0}; }), mode, "bad layer range");
  CHECK_REFUSED(with([](Plan& p) { p.jobs[0].layers = {-1, 1}; }), mode, "bad layer range");
  CHECK_REFUSED(with([](Plan& p) { p.jobs[2].layers = {3, 5}; }), mode, "bad layer range");
  CHECK_REFUSED(with([](Plan& p) { p.jobs[3].microbatches = {0, 3}; }), mode, "bad microbatch range");
  CHECK_REFUSED(with([](Plan& p) { p.jobs[3].microbatches = {0, 1}; }), mode, "job 4");
  CHECK_REFUSED(with([](Plan& p) { p.jobs[4].microbatches = {0, 1}; }), mode, "backward of layer 0, microbatch 1");
  CHECK_REFUSED(with([](Plan& p) { p.jobs[1].phase = Phase::kFused; }), mode, "stops before the last layer");
  CHECK_REFUSED(with([](Plan& p) { p.jobs[2].phase = Phase::kForward; }), mode, "only fused jobs");
  CHECK_REFUSED(with([](Plan& p) { p.jobs.clear(); }), mode, "no job runs the forward of layer 0, microbatch 0");
  CHECK_REFUSED(fused_plan(), PlanMode::kTrain, "mode train does not know");
  CHECK_REFUSED(train_plan(), PlanMode::kInference, "mode inference does not know");
  CHECK_REFUSED(train_plan(), PlanMode::kFused, "only fused jobs");
}

TEST_CASE("costs: bad fields are named") {
  LayerCosts costs(2);
  validate(costs);
  costs[1].saved_bytes = -1;
  CHECK_THROWS_WITH_AS(validate(costs), doctest::Contains("costs[1].saved_bytes is -1"), std::invalid_argument);
  costs[0].backward_ms = std::stod("nan");
  CHECK_THROWS_WITH_AS(validate(costs), doctest::Contains("costs[0].backward_ms"), std::invalid_argument);
  CHECK_THROWS_AS(validate(LayerCosts{}), std::invalid_argument);

  Cluster cluster;
  CHECK_THROWS_WITH_AS(validate(cluster), doctest::Contains("cluster.devices is empty"), std::invalid_argument);
  cluster.devices.resize(2);
  validate(cluster);
  cluster.host_gb_per_s = -3;
  CHECK_THROWS_WITH_AS(validate(cluster), doctest::Contains("cluster.host_gb_per_s"), std::invalid_argument);
  cluster.devices[1].speed = 0;
  CHECK_THROWS_WITH_AS(validate(cluster), doctest::Contains("cluster.devices[1].speed"), std::invalid_argument);

  const LayerCosts stage{{.forward_ms = 1, .backward_ms = 2}, {.forward_ms = 3, .backward_ms = 5}};
  CHECK(CostSums(stage).forward_ms({0, 2}) == 4);
  CHECK(CostSums(stage).backward_ms({1, 2}) == 5);
  CHECK(CostSums(stage).backward_ms({1, 1}) == 0);
}
