#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "../rounds.h"
#include "plan_cases.h"

using namespace roundpipe::schedule;
using namespace roundpipe::simulate;
using plan_cases::Case;

namespace {

constexpr int kTrueSteps = 97;
constexpr double kTie = 0.001;  // plans so near are equal

// The step of the plan found, over more steps than the search simulates to compare plans.
double found_ms(const Case& of, const SearchOptions& options) {
  const PlanChoice choice = search_links(of.costs, of.cluster, options, of.rules).front();
  const int steps = of.rules.timing.asynchronous ? kTrueSteps : 1;
  const std::vector<Plan> plans = place_over_links(choice.recipe, of.costs, of.cluster, of.rules, steps);
  double speeds = 0;
  for (const ClusterDevice& device : of.cluster.devices) speeds += device.speed;
  return std::max(simulate_links(plans, of.costs, of.cluster, of.rules).timeline.steady_step_ms,
                  choice.rating.work_ms / speeds);
}

}  // namespace

TEST_CASE("link search: each limit, loosened in two steps, never gives a slower plan") {
  std::vector<std::string> names = {"07-experts",  // the short form's
                                    "10-unequal", "qwen3-1.7b", "29-head",  "08-giant",
                                    "09-head",    "21-uneven",  "43-giant", "llama3.1-8b"};
  names.resize(static_cast<std::size_t>(rounds(1, static_cast<int>(names.size()))));
  for (const Case& of : plan_cases::named(names)) {
    CAPTURE(of.name);
    SearchOptions loose;
    loose.plan.microbatches = of.microbatches;
    loose.plan.gradient_groups = of.microbatches;
    loose.effort = rounds(30'000'000, 100'000'000);
    const double loose_ms = found_ms(of, loose);
    const auto tightened_ms = [&](auto tighten) {
      SearchOptions options = loose;
      tighten(options);
      return found_ms(of, options);
    };
    // From the tightest limits to the loosest.
    const auto check = [&](const char* limit, const std::vector<double>& steps_ms) {
      CAPTURE(limit);
      for (std::size_t i = 1; i < steps_ms.size(); ++i) CHECK(steps_ms[i] <= steps_ms[i - 1] * (1 + kTie));
    };
    check("traffic", {tightened_ms([](SearchOptions& options) { options.max_traffic = 1; }),
                      tightened_ms([](SearchOptions& options) { options.max_traffic = 1.25; }), loose_ms});
    check("replicas and groups",
          {tightened_ms([](SearchOptions& options) { options.replicas = false; }),
           tightened_ms([](SearchOptions& options) { options.plan.gradient_groups = 1; }), loose_ms});
    check("fused layers", {loose_ms, tightened_ms([](SearchOptions& options) { options.max_fused_layers = 2; }),
                           tightened_ms([](SearchOptions& options) { options.max_fused_layers = 4; })});
    if (of.rules.timing.asynchronous)
      check("overlap", {tightened_ms([](SearchOptions& options) { options.interleave = false; }), loose_ms});
  }
}
