#include <roundpipe/schedule/search_runs.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace roundpipe::schedule {

namespace {

// All runs of a search with replicas, overlap and gradient groups; each takes what run_parts() says, whatever the
// limits of the search are.
constexpr std::int64_t kParts = 56;
constexpr std::array kTrafficRungs = {1.0, 1.25, 2.0};
constexpr int kFusedRung = 2;
constexpr std::size_t kInherited = 2;
constexpr int kFinalistsOfRun = 4;

double limit_or_infinity(double traffic) { return traffic > 0 ? traffic : std::numeric_limits<double>::infinity(); }

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

// The limits of all runs, tighter ones first.
std::vector<SearchOptions> runs_of(const SearchOptions& options, bool has_gradients) {
  SearchOptions run = options;
  run.finalists = std::min(options.finalists, kFinalistsOfRun);
  const bool fused = options.plan.mode == PlanMode::kFused, trains = options.plan.mode != PlanMode::kInference;
  std::vector<SearchOptions> runs;
  const auto add = [&] {
    // Two further runs with more fused layers take as much as the one before them.
    run.effort = options.effort * run_parts(run) / (run.max_fused_layers > 1 ? 2 * kParts : kParts);
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
  if (fused && options.max_fused_layers > kFusedRung) most_fused.push_back(kFusedRung);
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

void check(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options) {
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
  require(options.max_waiting_bytes >= 0, "max_waiting_bytes is less than 0, expected 0 (no limit) or more");
  require(options.effort >= 0 && options.finalists >= 1, "effort or finalists is too small");
  require(options.plan.first_backward_layer >= 0 && options.plan.first_backward_layer <= static_cast<int>(costs.size()),
          "first_backward_layer is " + std::to_string(options.plan.first_backward_layer) + ", expected a layer");
}

}  // namespace

bool is_within(const SearchOptions& tight, const SearchOptions& loose) {
  return tight.replicas <= loose.replicas && tight.interleave <= loose.interleave &&
         tight.max_fused_layers <= loose.max_fused_layers &&
         (!tight.replicas || tight.plan.gradient_groups == loose.plan.gradient_groups ||
          tight.plan.gradient_groups == 1) &&
         (!tight.replicas || limit_or_infinity(tight.max_traffic) <= limit_or_infinity(loose.max_traffic));
}

bool is_settled(const PlanChoice& best, const SearchOptions& limits, int layers, int devices) {
  if (best.rating.bubble >= kNoBubble) return false;
  if (devices == 1 || limits.plan.mode != PlanMode::kFused || limits.plan.gradient_groups == 1) return true;
  const int most = std::min(limits.max_fused_layers, layers - limits.plan.first_backward_layer);
  return best.cut.backward.front().layers.size() >= most;
}

std::vector<SearchRun> search_runs(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options) {
  check(costs, cluster, options);
  const CostSums sums = sums_of(costs, options.plan);
  std::vector<SearchRun> runs;
  for (SearchOptions& limits : runs_of(options, sums.trains({0, sums.layers()}))) {
    std::vector<const PlanChoice*> inherited;
    bool settled = false;
    for (const SearchRun& before : runs) {
      if (before.found.choices.empty() || !is_within(before.limits, limits)) continue;
      const PlanChoice& best = before.found.choices.front();
      settled |= before.limits.max_fused_layers == limits.max_fused_layers &&
                 is_settled(best, limits, sums.layers(), static_cast<int>(cluster.devices.size()));
      if (std::ranges::find(inherited, best.cut, [](const PlanChoice* choice) -> const Cut& { return choice->cut; }) ==
          inherited.end())
        inherited.push_back(&best);
    }
    runs.push_back({limits, {}});
    if (settled) continue;
    std::ranges::stable_sort(inherited, {}, [](const PlanChoice* choice) { return choice->score_ms; });
    for (std::size_t i = std::min(kInherited, inherited.size()); i-- > 0;)
      limits.starts.insert(limits.starts.begin(), inherited[i]->cut);
    runs.back().found = search_cuts(costs, cluster, limits);
  }
  return runs;
}

void throw_no_plan(const std::vector<SearchRun>& runs, const SearchOptions& options) {
  const CutsFound& last = runs.back().found;
  if (last.host_binds) {
    throw HostTooSmall("[plan] at least " + std::to_string(last.least_waiting) +
                       " bytes wait on the host between stages, expected at most " +
                       std::to_string(options.max_waiting_bytes) + "; use fewer microbatches or longer stages");
  }
  throw std::invalid_argument(last.traffic_binds
                                  ? "[plan] max_traffic is " + std::to_string(options.max_traffic) +
                                        ", expected at least what one visit to each stage takes; raise it"
                                  : std::string("[plan] no plan fits the devices' memory; use larger devices"));
}

}  // namespace roundpipe::schedule
