#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include <roundpipe/core/error.h>
#include <roundpipe/schedule/cut.h>
#include <roundpipe/schedule/placer.h>

namespace roundpipe::schedule {

// Whether plans of training may keep the activations of more layers than the head, if there is memory for them: on one
// device, and on a few that share stages by gradient groups. For eight devices, a search that tries it takes twice as
// long, and its steps are shorter by 0.7 % at most (the five presets).
constexpr bool may_keep_layers(int devices, int gradient_groups) {
  return devices == 1 || (devices <= 4 && gradient_groups != 1);
}

// The limits of a search: which plans it may consider, and how much effort it may spend.
struct SearchOptions {
  // The search uses mode, microbatches and first_backward_layer. min_stages and upper_threshold only shape the greedy
  // and balanced plans that it starts from.
  PlannerOptions plan;
  TimingRules rules;
  UpdateRate update;
  double max_traffic = 0;              // see traffic_ratio; 0 = no limit
  std::int64_t max_waiting_bytes = 0;  // see waiting_bytes; 0 = no limit
  bool replicas = true;      // may split a stage by microbatches, which changes gradient sums in the last bits
  bool interleave = true;    // asynchronous steps may overlap, see Cut::interleave
  int max_fused_layers = 1;  // limit on the fused stage, which keeps its activations instead of recomputing
  // Budget in microbatch visits, about 3 ns each. Counted, not timed, so that the same input gives the same plan. A
  // search with fewer possibilities spends less, one with max_fused_layers above 1 up to twice as much.
  std::int64_t effort = 392'000'000;
  unsigned seed = 3;
  int finalists = 16;  // plans that are returned, at most
  // The step of the plans that are returned is that of a simulation as long as those of the commands, whatever the
  // effort; false: for who only takes the plan. Matters to simulate::search_links.
  bool promises = true;
  // Cuts of the same layers that are known already: the plan found is no worse than any of them that keeps the limits.
  std::vector<Cut> starts;
};

// A plan that the search found, with its predicted performance.
struct PlanChoice {
  Cut cut;
  Plan recipe;
  Rating rating;        // its step is at least least_time()
  double score_ms = 0;  // what plans are compared by: the step, and more where links are nearly full
  double traffic = 0;
  // The reason why the step is not shorter: "compute", "traffic limit", "device memory", "waiting values" (the limit of
  // what waits on the host), "fill and drain", "dependencies", or that of least_time().
  std::string limit;
};

// Sets the rating and the score of a choice from its recipe, over `steps` steps (asynchronous) or one; and the limit,
// if transfers or updates set the time of the step. Other fields are not read.
// `sums`: of these costs, from the options' first backward layer.
void score(PlanChoice& choice, const LayerCosts& costs, const CostSums& sums, const Cluster& cluster,
           const SearchOptions& options, int steps);

// Shrinks the fused stage to max_fused_layers; the other layers get a forward and a backward stage of their own. Keeps
// to single_backward_layers.
Cut limited_cut(Cut cut, int layers, const SearchOptions& options);

// Thrown if no plan exists because one layer alone does not fit the largest device.
class ROUNDPIPE_API LayerTooLarge : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Thrown if in every plan that fits the devices more waits on the host than max_waiting_bytes.
class ROUNDPIPE_API HostTooSmall : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Orders choices that score within 0.1 % of the first one: the least traffic first, then the least interleaving, then
// the evenest stages. REQUIRES: the best score comes first.
void settle_ties(std::vector<PlanChoice>& choices, const CostSums& sums);

}  // namespace roundpipe::schedule
