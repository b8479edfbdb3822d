#include <roundpipe/schedule/plan_choice.h>

#include <algorithm>
#include <cmath>
#include <tuple>
#include <utility>

#include <roundpipe/schedule/moved_bytes.h>

namespace roundpipe::schedule {

namespace {

constexpr double kTie = 0.001;
constexpr double kFullness = 8;  // how sharply a score rises when transfers take nearly as long as a step

double longest_ms(const Cut& cut, const CostSums& sums) {
  double longest = 0;
  for (const CutStage& stage : cut.forward) longest = std::max(longest, sums.forward_ms(stage.layers));
  for (const CutStage& stage : cut.backward)
    longest = std::max(longest, sums.recompute_ms(stage.layers) + sums.backward_ms(stage.layers));
  return longest;
}

}  // namespace

void score(PlanChoice& choice, const LayerCosts& costs, const CostSums& sums, const Cluster& cluster,
           const SearchOptions& options, int steps) {
  choice.rating = rate(choice.recipe, costs, cluster, options.rules, steps);
  choice.score_ms = choice.rating.step_ms;
  choice.limit.clear();
  if (!has_rates(cluster) && options.update.gb_per_s == 0) return;
  const LeastTime least = least_time(moved_bytes(choice.recipe, costs, sums), cluster, options.update);
  if (least.ms <= 0) return;
  const double clocked_ms = choice.rating.step_ms, longer_ms = std::max(clocked_ms, least.ms);
  // Transfers wait for each other long before a link is full: at 80 % of the step, this adds 2 %.
  const double ratio = std::min(clocked_ms, least.ms) / longer_ms;
  choice.score_ms = longer_ms * std::pow(1 + std::pow(ratio, kFullness), 1 / kFullness);
  if (least.ms <= clocked_ms) return;
  choice.rating.bubble = 1 - (1 - choice.rating.bubble) * clocked_ms / least.ms;
  choice.rating.step_ms = least.ms;
  choice.limit = least.limit;
}

Cut limited_cut(Cut cut, int layers, const SearchOptions& options) {
  const PlanMode mode = options.plan.mode;
  if (mode == PlanMode::kFused) {
    const Range fused = cut.backward.front().layers;
    const int first = std::max(fused.first, layers - options.max_fused_layers);
    const int lowest = std::max(fused.first, options.plan.first_backward_layer);
    cut.backward.front().layers.first = first;
    if (fused.first < first) cut.forward.push_back({{fused.first, first}, 1});
    if (lowest < first) cut.backward.insert(cut.backward.begin() + 1, {{lowest, first}, 1});
  }
  return options.plan.single_backward_layers ? with_single_backward_layers(std::move(cut), mode) : cut;
}

void settle_ties(std::vector<PlanChoice>& choices, const CostSums& sums) {
  if (choices.empty()) return;
  const double most_ms = choices.front().score_ms * (1 + kTie);
  const auto first_worse =
      std::ranges::find_if(choices, [&](const PlanChoice& choice) { return choice.score_ms > most_ms; });
  std::ranges::stable_sort(choices.begin(), first_worse, {}, [&](const PlanChoice& choice) {
    return std::make_tuple(choice.traffic, choice.cut.interleave, longest_ms(choice.cut, sums));
  });
}

}  // namespace roundpipe::schedule
