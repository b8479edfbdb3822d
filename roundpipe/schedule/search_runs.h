#pragma once

#include <cstdint>
#include <vector>

#include <roundpipe/schedule/cut_search.h>

namespace roundpipe::schedule {

// Annealing settles, so beyond this effort another search with other random numbers finds more than a longer one.
constexpr std::int64_t kMostEffort = SearchOptions{}.effort;
constexpr unsigned kSeedsOfSearch = 2;  // one search uses so many, from SearchOptions::seed on
// Less idle time than this is not worth another search.
constexpr double kNoBubble = 0.0002;

// Whether every plan that `tight` may find is one that `loose` may find, as far as replicas, gradient groups, traffic,
// overlap and fused layers limit them.
bool is_within(const SearchOptions& tight, const SearchOptions& loose);

// Whether a run within `limits` need not be tried, if a tighter one with as many fused layers has found this plan: no
// device idles, and where devices may share gradient groups it keeps all layers that it may, so work is least, too.
bool is_settled(const PlanChoice& best, const SearchOptions& limits, int layers, int devices);

struct SearchRun {
  SearchOptions limits;
  CutsFound found;  // nothing if the run was left out
};

// One search: its runs, from the tightest limits to the caller's, as search() says. What a run does depends on its own
// limits and on what the runs within them have found, so a search with looser limits makes the same runs and more.
//
// A run is left out if one within it, with as many fused layers, has found a plan that settles it.
// Deterministic. Throws LayerTooLarge with the layer's number, and std::invalid_argument for bad costs, cluster or
// options. REQUIRES: options.effort is at most kMostEffort.
std::vector<SearchRun> search_runs(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options);

// The error of a search that has found no plan.
[[noreturn]] void throw_no_plan(const std::vector<SearchRun>& runs, const SearchOptions& options);

}  // namespace roundpipe::schedule
