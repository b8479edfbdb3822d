#include <roundpipe/schedule/search.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include <roundpipe/schedule/cut_search.h>

namespace roundpipe::schedule {

namespace {

// All runs of a search with replicas, overlap and gradient groups; each takes what run_parts() says, whatever the
// limits of the search are.
constexpr std::int64_t kParts = 56;
constexpr std::array kTrafficRungs = {1.0, 1.25, 2.0};
constexpr std::size_t kInherited = 2;
constexpr int kFinalistsOfRun = 4;
constexpr double kSmallBubble = 0.005;

double limit_or_infinity(double traffic) { return traffic > 0 ? traffic : std::numeric_limits<double>::infinity(); }

// Whether every plan that `tight` may find is one that `loose` may find.
bool is_within(const SearchOptions& tight, const SearchOptions& loose) {
  return tight.replicas <= loose.replicas && tight.interleave <= loose.interleave &&
         tight.max_fused_layers <= loose.max_fused_layers &&
         (!tight.replicas || tight.plan.gradient_groups == loose.plan.gradient_groups ||
          tight.plan.gradient_groups == 1) &&
         (!tight.replicas || limit_or_infinity(tight.max_traffic) <= limit_or_infinity(loose.max_traffic));
}

// Of the effort. Replicas are worth most in synchronous steps, which fill and drain, overlap in asynchronous ones.
std::int64_t run_parts(const SearchOptions& run) {
  const bool asynchronous = run.rules.asynchronous;
  if (!run.replicas) return asynchronous ? 2 : 1;
  if (run.max_traffic == kTrafficRungs[0]) return 1;
  if (run.max_traffic == kTrafficRungs[1]) return asynchronous ? 2 : 12;
  if (run.max_traffic == kTrafficRungs[2]) return asynchronous ? 2 : 9;
  if (asynchronous) return run.interleave ? 9 : 3;
  return 5;
}

// The runs of a search: tighter limits first. A search with looser limits makes the same runs and more, so it finds no
// worse plan.
std::vector<SearchOptions> runs_of(const SearchOptions& options, bool has_gradients) {
  SearchOptions run = options;
  run.finalists = std::min(options.finalists, kFinalistsOfRun);
  const bool fused = options.plan.mode == PlanMode::kFused, trains = options.plan.mode != PlanMode::kInference;
  std::vector<SearchOptions> runs;
  const auto add = [&] {
    run.effort = options.effort * run_parts(run) / kParts;
    runs.push_back(run);
  };
  const auto add_without_replicas = [&] {
    run.replicas = false;
    run.max_traffic = options.max_traffic < 1 ? options.max_traffic : 0;
    for (unsigned other = 0; other < kSeedsOfSearch; ++other) {
      run.seed = options.seed + other;
      add();
    }
    run.seed = options.seed;
  };
  const auto add_with_replicas = [&] {
    run.replicas = true;
    for (const double rung : kTrafficRungs) {
      if (rung >= limit_or_infinity(options.max_traffic)) break;
      run.max_traffic = rung;
      add();
    }
    run.max_traffic = options.max_traffic;
    add();
  };
  std::vector<int> most_fused{1};
  if (fused && options.max_fused_layers > 1) most_fused.push_back(options.max_fused_layers);
  std::vector<bool> interleaves{false};
  if (fused && options.rules.asynchronous && options.interleave) interleaves.push_back(true);
  std::vector<int> groups{options.plan.gradient_groups};
  if (trains && has_gradients && options.plan.gradient_groups != 1) groups.insert(groups.begin(), 1);
  for (const int layers : most_fused) {
    run.max_fused_layers = layers;
    for (const bool interleave : interleaves) {
      run.interleave = interleave;
      run.plan.gradient_groups = groups.front();
      add_without_replicas();
      for (const int count : groups) {
        run.plan.gradient_groups = count;
        if (options.replicas && options.plan.microbatches > 1) add_with_replicas();
      }
    }
  }
  return runs;
}

void merge(std::vector<PlanChoice>& all, std::vector<PlanChoice> found) {
  for (PlanChoice& choice : found) {
    if (std::ranges::find(all, choice.cut, &PlanChoice::cut) == all.end()) all.push_back(std::move(choice));
  }
  std::ranges::stable_sort(all, {}, &PlanChoice::score_ms);
}

// One search: all its runs. Adds what it finds to `all`; returns the limits that its last run met.
CutsFound search_once(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options,
                      const CostSums& sums, std::vector<PlanChoice>& all) {
  std::vector<SearchOptions> runs = runs_of(options, sums.trains({0, sums.layers()}));
  std::vector<std::optional<PlanChoice>> best_of(runs.size());
  CutsFound last;
  int settled = 0;  // fused layers with which no device idles; only more of them make less work
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (runs[i].max_fused_layers == settled) continue;
    std::vector<PlanChoice> inherited;
    for (std::size_t j = 0; j < i; ++j) {
      if (best_of[j] && is_within(runs[j], runs[i])) merge(inherited, {*best_of[j]});
    }
    if (inherited.size() > kInherited) inherited.resize(kInherited);
    for (std::size_t j = inherited.size(); j-- > 0;) runs[i].starts.insert(runs[i].starts.begin(), inherited[j].cut);
    last = search_cuts(costs, cluster, runs[i]);
    if (!last.choices.empty()) {
      best_of[i] = last.choices.front();
      if (best_of[i]->rating.bubble < kNoBubble) settled = runs[i].max_fused_layers;
    }
    merge(all, std::move(last.choices));
  }
  return last;
}

}  // namespace

std::vector<PlanChoice> search(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options) {
  validate(costs);
  validate(cluster);
  const auto require = [](bool ok, const std::string& what) {
    if (!ok) throw std::invalid_argument("[plan] " + what);
  };
  require(options.plan.microbatches >= 1,
          "microbatches is " + std::to_string(options.plan.microbatches) + ", expected at least 1");
  require(options.plan.gradient_groups >= 0, "gradient_groups is " + std::to_string(options.plan.gradient_groups) +
                                                 ", expected 0 (replicas cut anywhere) or more");
  require(options.max_traffic >= 0 && std::isfinite(options.max_traffic),
          "max_traffic is " + std::to_string(options.max_traffic) + ", expected 0 (no limit) or more");
  require(options.max_fused_layers >= 1, "max_fused_layers is less than 1, expected at least the last layer");
  require(options.effort >= 0 && options.finalists >= 1, "effort or finalists is too small");
  require(options.plan.first_backward_layer >= 0 && options.plan.first_backward_layer <= static_cast<int>(costs.size()),
          "first_backward_layer is " + std::to_string(options.plan.first_backward_layer) + ", expected a layer");
  const CostSums sums(costs, options.plan.first_backward_layer);
  std::vector<PlanChoice> all;
  CutsFound last;
  SearchOptions one = options;
  std::int64_t left = options.effort;
  do {
    one.effort = std::min(left, kMostEffort);
    left -= one.effort;
    last = search_once(costs, cluster, one, sums, all);
    one.seed += kSeedsOfSearch;
  } while (left > 0 && (all.empty() || all.front().rating.bubble >= kNoBubble));
  if (all.empty()) {
    throw std::invalid_argument(last.traffic_binds
                                    ? "[plan] max_traffic is " + std::to_string(options.max_traffic) +
                                          ", expected at least what one visit to each stage takes; raise it"
                                    : std::string("[plan] no plan fits the devices' memory; use larger devices"));
  }
  settle_ties(all, sums);
  all.resize(std::min(all.size(), static_cast<std::size_t>(options.finalists)));
  for (PlanChoice& choice : all) {
    if (!choice.limit.empty()) continue;
    if (choice.rating.bubble < kSmallBubble) {
      choice.limit = "compute";
    } else if (last.traffic_binds) {
      choice.limit = "traffic limit";
    } else if (last.memory_binds) {
      choice.limit = "device memory";
    } else {
      choice.limit = options.rules.asynchronous ? "dependencies" : "fill and drain";
    }
  }
  return all;
}

}  // namespace roundpipe::schedule
