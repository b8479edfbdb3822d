#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <roundpipe/schedule/cut.h>
#include <roundpipe/schedule/placer.h>

namespace roundpipe::schedule {

// The limits of a search: which plans it may consider, and how much effort it may spend.
struct SearchOptions {
  // The search uses mode, microbatches and first_backward_layer. min_stages and upper_threshold only shape the greedy
  // and balanced plans that it starts from.
  PlannerOptions plan;
  TimingRules rules;
  // Weights that the host's optimizer updates, in 1e9 bytes per second; 0 = at once.
  double update_gb_per_s = 0;
  double max_traffic = 0;    // see traffic_ratio; 0 = no limit
  bool replicas = true;      // may split a stage by microbatches, which changes gradient sums in the last bits
  bool interleave = true;    // asynchronous steps may overlap, see Cut::interleave
  int max_fused_layers = 1;  // limit on the fused stage, which keeps its activations instead of recomputing
  // Budget in microbatch visits, about 2 ns each. Counted, not timed, so that the same input gives the same plan.
  std::int64_t effort = 220'000'000;
  unsigned seed = 3;
  int finalists = 16;
};

// A plan that the search found, with its predicted performance.
struct PlanChoice {
  Cut cut;
  Plan recipe;
  Rating rating;        // its step is at least least_time()
  double score_ms = 0;  // what plans are compared by: the step, and more where links are nearly full
  double traffic = 0;
  // The reason why the step is not shorter: "compute", "traffic limit", "device memory", "fill and drain",
  // "dependencies", or that of least_time().
  std::string limit;
};

// Sets the rating and the score of a choice from its recipe, over `steps` steps (asynchronous) or one; and the limit,
// if transfers or updates set the time of the step. Other fields are not read.
// `sums`: of these costs, from the options' first backward layer.
void score(PlanChoice& choice, const LayerCosts& costs, const CostSums& sums, const Cluster& cluster,
           const SearchOptions& options, int steps);

// Shrinks the fused stage to max_fused_layers; the other layers get a forward and a backward stage of their own.
Cut limited_cut(Cut cut, int layers, const SearchOptions& options);

// Thrown if no plan exists because one layer alone does not fit the largest device.
class LayerTooLarge : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Returns the best plans found, best first. Their cuts differ, and there is at least one.
//
// Transfers count by the least time that they take at the cluster's bandwidths; simulate::search_links simulates them.
//
// The search starts from several shapes. Coordinate descent varies the number of stages, the number of one-layer stages
// at both ends, the replicas at both ends and of the fused stage, and the interleaving; exact partitions cut the layers
// in between. Annealing then changes single stages, for models whose layers differ. The greedy plan, with its fused
// stage limited to max_fused_layers, is a candidate, so the best plan is no slower if the greedy one keeps the limits.
// Deterministic.
// Throws LayerTooLarge with the layer's number, and std::invalid_argument for bad costs, cluster or options and for
// limits that no plan keeps.
std::vector<PlanChoice> search(const LayerCosts& costs, const Cluster& cluster, const SearchOptions& options);

}  // namespace roundpipe::schedule
