#include <roundpipe/schedule/search.h>

#include <algorithm>
#include <utility>

namespace roundpipe::schedule {

namespace {

constexpr double kSmallBubble = 0.005;

void merge(std::vector<PlanChoice>& all, std::vector<PlanChoice> found) {
  for (PlanChoice& choice : found) {
    if (std::ranges::find(all, choice.cut, &PlanChoice::cut) == all.end()) all.push_back(std::move(choice));
  }
  std::ranges::stable_sort(all, {}, &PlanChoice::score_ms);
}

}  // namespace

std::vector<PlanChoice> search(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options) {
  std::vector<PlanChoice> all;
  std::vector<SearchRun> runs;
  bool traffic_binds = false, memory_binds = false, host_binds = false;  // in the last run that was made
  SearchOptions one = options;
  std::int64_t left = options.effort;
  do {
    one.effort = std::min(left, kMostEffort);
    left -= one.effort;
    runs = search_runs(costs, cluster, one);
    for (SearchRun& run : runs) {
      if (run.found.choices.empty()) continue;
      traffic_binds = run.found.traffic_binds;
      memory_binds = run.found.memory_binds;
      host_binds = run.found.host_binds;
      merge(all, std::move(run.found.choices));
    }
    one.seed += kSeedsOfSearch;
  } while (left > 0 && (all.empty() || all.front().rating.bubble >= kNoBubble));
  if (all.empty()) throw_no_plan(runs, options);
  settle_ties(all, sums_of(costs, options.plan));
  all.resize(std::min(all.size(), static_cast<std::size_t>(options.finalists)));
  for (PlanChoice& choice : all) {
    if (!choice.limit.empty()) continue;
    if (choice.rating.bubble < kSmallBubble) {
      choice.limit = "compute";
    } else if (traffic_binds) {
      choice.limit = "traffic limit";
    } else if (host_binds) {
      choice.limit = "waiting values";
    } else if (memory_binds) {
      choice.limit = "device memory";
    } else {
      choice.limit = options.rules.asynchronous ? "dependencies" : "fill and drain";
    }
  }
  return all;
}

}  // namespace roundpipe::schedule
