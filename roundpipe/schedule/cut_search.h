#pragma once

#include <vector>

#include <roundpipe/schedule/plan_choice.h>

namespace roundpipe::schedule {

struct CutsFound {
  std::vector<PlanChoice> choices;  // best first; empty if no plan keeps the limits
  bool traffic_binds = false;       // whether a cut was refused for its traffic
  bool memory_binds = false;        // or for its memory
  bool host_binds = false;          // or for what waits on the host
  // What waits on the host at least, in plans that fit the devices; 0 if the host's limit does not matter.
  std::int64_t least_waiting = 0;
};

// One run of the search with one stream of random numbers: coordinate descent over shapes of cuts, and annealing of
// single stages.
// Deterministic. REQUIRES: costs, cluster and options that search() accepts. Throws LayerTooLarge.
CutsFound search_cuts(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options);

}  // namespace roundpipe::schedule
