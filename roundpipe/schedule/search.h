#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <roundpipe/schedule/cut.h>
#include <roundpipe/schedule/placer.h>

namespace roundpipe::schedule {

// What a search may use, and how long it may look.
struct SearchOptions {
  // mode, microbatches and first_backward_layer; min_stages and upper_threshold shape the greedy plan that the search
  // starts from.
  PlannerOptions plan;
  TimingRules rules;
  double max_traffic = 0;    // see traffic_ratio; 0 = no limit
  bool replicas = true;      // stages may be split over microbatch ranges: other sums of gradients, in the last bits
  bool interleave = true;    // asynchronous steps may overlap in their order, see Cut::interleave
  int max_fused_layers = 1;  // a fused stage of so many layers keeps their activations instead of recomputing
  // Microbatch visits to clock, about 2 ns each. Counted, not timed, so that the same input gives the same plan.
  std::int64_t effort = 220'000'000;
  unsigned seed = 3;
  int finalists = 16;
};

// A plan that was found, with what it is predicted to do.
struct PlanChoice {
  Cut cut;
  Plan recipe;
  Rating rating;
  double traffic = 0;
  // What keeps the step from being shorter: "compute", "traffic limit", "device memory", "fill and drain" or
  // "dependencies".
  std::string limit;
};

// No plan can be made: a layer by itself does not fit the largest device.
class LayerTooLarge : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// The best plans found, best first, with different cuts; never empty.
//
// Coordinate descent over the numbers of stages, one-layer stages at the ends, replicas at both ends and of the fused
// stage, and interleaving, with exact partitions in between, from several starts; then annealing of single stages, for
// layers that are not alike. The greedy plan is among the candidates, so no result is worse. Deterministic.
// Throws LayerTooLarge with the layer's number, and std::invalid_argument for bad costs, cluster or options, and limits
// that no plan keeps.
std::vector<PlanChoice> search(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options);

}  // namespace roundpipe::schedule
