#pragma once

#include <span>
#include <string>
#include <utility>
#include <vector>

#include <roundpipe/schedule/costs.h>
#include <roundpipe/schedule/planner.h>

namespace roundpipe::schedule {

// A stage and over how many devices its microbatches are split, in contiguous ranges.
struct CutStage {
  Range layers;
  int replicas = 1;

  bool operator==(const CutStage&) const = default;
};

// How the layers are cut into stages, with replicas and the order of steps. One round over all microbatches.
struct Cut {
  std::vector<CutStage> forward;   // first layers first
  std::vector<CutStage> backward;  // last layers first; a fused mode's front is the fused stage
  // How far the backward of a step falls behind the forward of the next: a job's order is interleave * its place in
  // the work of the step, in [0, 1]. 1 = step after step.
  double interleave = 1;

  bool operator==(const Cut&) const = default;
};

// Without replicas and interleaving.
Cut to_cut(const Stages& stages);
Stages to_stages(const Cut& cut);
// "forward 16x1 39x2 | fused 1 | backward 94x1", replicas as "(6,3)".
std::string to_string(const Cut& cut);

// The plan of `cut`; every device 0, for a Placer. REQUIRES: the stages fit `sums` and the options.
// The result is not validated.
Plan to_recipe(const Cut& cut, const CostSums& sums, int devices, const PlannerOptions& options);

// Weight bytes uploaded in a step, over those of one forward and one backward visit to each layer. The last layer, of
// which each replica needs a copy in any plan, is left out where there is another.
double traffic_ratio(const Plan& plan, const CostSums& sums);

// Consecutive layers cut into stages by dynamic programming: for every number of stages the least sum of squared stage
// costs, no stage above the device memory cap. Exact; each number of stages costs O(layers^2) once.
class PartitionTable {
 public:
  // `backward`: cost recompute + backward and count gradients and saved activations, else forward.
  // `room_bytes`: of a device, see CostSums::visit_bytes; 0 = no cap.
  PartitionTable(const CostSums& sums, Range layers, bool backward, std::int64_t room_bytes);

  // Table entries filled since the last call.
  std::int64_t take_work() { return std::exchange(work_, 0); }

  // First layers first; empty when no partition into so many stages fits.
  std::vector<Range> cut(int stages);

 private:
  void extend(int stages);

  const Range layers_;
  const std::size_t width_;
  std::vector<double> prefix_;        // cost of the first layers
  std::vector<int> first_that_fits_;  // [end]: the longest stage that ends there begins so
  std::vector<std::vector<double>> least_;
  std::vector<std::vector<int>> begins_;
  std::int64_t work_ = 0;
};

// Fills stages greedily up to threshold * max(longest layer, total / min_stages), as the published planner does;
// backward stages from the last layers down. Throws std::invalid_argument like choose_stages.
Stages greedy_stages(const LayerCosts& costs, int devices, const PlannerOptions& options);

}  // namespace roundpipe::schedule
