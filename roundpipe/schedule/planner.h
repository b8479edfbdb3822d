#pragma once

#include <cstdint>
#include <vector>

#include <roundpipe/schedule/costs.h>
#include <roundpipe/schedule/plan.h>

namespace roundpipe::schedule {

struct PlannerOptions {
  PlanMode mode = PlanMode::kFused;
  // Microbatches of a step. All of them pass through a stage in one visit.
  int microbatches = 1;
  // At least this many forward and this many backward stages, where there are enough layers. 0 = one a device.
  int min_stages = 0;
  // A stage costs at most this times max(largest layer, total / min_stages). At least 1; smaller = more, evener stages.
  double upper_threshold = 1.1;
  // Cap on a stage's device memory: its weights, and in backward and fused stages its gradients and one microbatch's
  // saved activations too. 0 = no cap.
  std::int64_t max_stage_bytes = 0;
  // Layers below are frozen and their inputs need no gradient. No effect in kInference.
  int first_backward_layer = 0;
  // The device of the first job; a caller may go on where the last plan stopped.
  int first_device = 0;
};

// How the layers are cut. Both lists are in the order in which they run.
struct Stages {
  std::vector<Range> forward;
  // From the last layers down to first_backward_layer. In kFused the front is the fused stage, and `forward` ends
  // where it starts; empty in kInference.
  std::vector<Range> backward;

  bool operator==(const Stages&) const = default;
};

// Balances forward stages by forward time, backward and fused stages by forward + backward time (the recomputed forward
// included), with as few stages as the options allow. Deterministic.
// Throws std::invalid_argument for bad costs or options, and for a layer over max_stage_bytes.
Stages choose_stages(const LayerCosts& costs, int devices, const PlannerOptions& options);

// One round over all microbatches: one job a stage, in stage order, devices in turn from first_device.
// Throws std::invalid_argument if the stages do not make a valid plan.
Plan make_plan(const Stages& stages, int layers, int devices, const PlannerOptions& options);

}  // namespace roundpipe::schedule
