#pragma once

#include <span>
#include <string>
#include <vector>

#include <roundpipe/schedule/costs.h>
#include <roundpipe/schedule/partition.h>
#include <roundpipe/schedule/planner.h>

namespace roundpipe::schedule {

// A stage. Its microbatches are split into `replicas` contiguous ranges, one job each; see
// PlannerOptions::gradient_groups.
struct CutStage {
  Range layers;
  int replicas = 1;

  bool operator==(const CutStage&) const = default;
};

// The layers cut into stages, with replicas and the overlap of steps. A step is one round over all microbatches.
struct Cut {
  std::vector<CutStage> forward;   // first layers first
  std::vector<CutStage> backward;  // last layers first; in kFused, the front is the fused stage
  // How far the backward of a step lags behind the forward of the next one. A job's order is interleave * (share of the
  // step's work that comes before the job). 1 = steps run one after another.
  double interleave = 1;

  bool operator==(const Cut&) const = default;
};

// Stages have no replicas and no interleaving: to_cut sets one replica and no overlap, to_stages drops both.
Cut to_cut(const Stages& stages);
Stages to_stages(const Cut& cut);
// Cuts the backward stages, but a fused one, into single layers with the same replicas.
Cut with_single_backward_layers(Cut cut, PlanMode mode);
// "forward 16x1 39x2 | backward 1x1*4 94x1 | interleave 1.25": 39x2 is 39 stages of two layers, *4 is four replicas. A
// fused stage is the first of `backward`; an interleave of 1 is left out.
std::string to_string(const Cut& cut);

// The most replicas that a stage can have: its microbatches or, if it goes backward and has gradients, their groups.
int most_replicas(Range layers, bool backward, const CostSums& sums, const PlannerOptions& options);

// Makes the plan of `cut` with every job on device 0; a Placer chooses the devices. Does not validate the plan.
// Replicas above most_replicas() are left out.
// REQUIRES: the stages fit `sums`, which are from the options' first backward layer.
Plan to_recipe(const Cut& cut, const CostSums& sums, int devices, const PlannerOptions& options);

// The weight bytes that a step uploads, divided by the bytes of one forward and one backward visit to each layer. The
// last layer is not counted, unless it is the only one: in any plan, each of its replicas needs a copy.
double traffic_ratio(const Plan& plan, const CostSums& sums);

// What waits on the host between stages in a step: of all microbatches, the inputs of each backward stage. Those of the
// model are not counted.
std::int64_t waiting_bytes(const Cut& cut, const CostSums& sums, int microbatches);

// The partitions of `layers` into possible stages, of which none of several layers exceeds the device memory for a
// visit, `room_bytes` (0 = no cap; see CostSums::fits). `backward`: a stage costs recompute + backward, and its memory
// includes gradients and saved activations; otherwise it costs its forward.
PartitionTable partitions_of(const CostSums& sums, Range layers, bool backward, std::int64_t room_bytes);

// Fills stages greedily up to threshold * max(longest layer, total / min_stages), as the published planner does.
// Backward stages are filled from the last layers down.
// REQUIRES: costs and options that choose_stages accepts (they are not checked). max_stage_bytes and
// single_backward_layers have no effect.
Stages greedy_stages(const LayerCosts& costs, int devices, const PlannerOptions& options);

}  // namespace roundpipe::schedule
