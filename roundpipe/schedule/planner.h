#pragma once

#include <cstdint>
#include <vector>

#include <roundpipe/schedule/costs.h>
#include <roundpipe/schedule/plan.h>

namespace roundpipe::schedule {

struct PlannerOptions {
  PlanMode mode = PlanMode::kFused;
  // Microbatches of a step. All of them run in one visit to a stage.
  int microbatches = 1;
  // Minimum number of forward stages, and of backward stages, if there are enough layers. 0 = one per device.
  int min_stages = 0;
  // A stage costs at most this times max(largest layer, total / min_stages). At least 1. A smaller value gives more and
  // more even stages.
  double upper_threshold = 1.1;
  // Cap on a stage's device memory: its weights and, in backward and fused stages, its gradients and one microbatch's
  // saved activations. 0 = no cap.
  std::int64_t max_stage_bytes = 0;
  // Layers below this one are frozen and their inputs need no gradient. No effect in kInference.
  int first_backward_layer = 0;
  // Groups of microbatches whose gradients are summed by themselves, see GradientGroups. A fused or backward job of a
  // stage with gradients covers whole groups, so such a stage has at most this many replicas. 0 = replicas may cut
  // microbatches anywhere.
  int gradient_groups = 0;
  // In kFused, the number of layers of the fused stage, if so many go backward, whatever its memory; the others are cut
  // as if by themselves. 0 = as balance says.
  int fused_layers = 0;
  // A search gives each backward stage one layer, unless it is fused: for backward passes layer by layer, each from its
  // own inputs.
  bool single_backward_layers = false;
  // The device of the first job. A caller can continue where the last plan stopped.
  int first_device = 0;
};

// The sums of `costs` for plans with these options.
CostSums sums_of(const LayerCosts& costs, const PlannerOptions& options);

// Balances forward stages by forward time, and backward and fused stages by forward + backward time (the forward stands
// for the recompute). Makes as few stages as the options allow. Deterministic.
// Throws std::invalid_argument for bad costs or options, and for a layer over max_stage_bytes.
Stages choose_stages(const LayerCosts& costs, int devices, const PlannerOptions& options);

// Makes one job per stage, in stage order, each for all microbatches; devices take turns from first_device.
// Throws std::invalid_argument for bad options, or if the stages do not make a valid plan.
Plan make_plan(const Stages& stages, int layers, int devices, const PlannerOptions& options);

}  // namespace roundpipe::schedule
