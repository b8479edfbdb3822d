#pragma once

#include <vector>

#include <roundpipe/runs/weight_places.h>
#include <roundpipe/runtime/model_optimizer.h>

namespace roundpipe {

// A fused optimizer of a model: its options by group, which are loaded before.
struct FusedTarget {
  runtime::ModelOptimizer& core;
  optim::Algorithm algorithm;
  optim::MomentFormat moments;
  std::vector<optim::Hyperparameters> options;
  bool is_shared = false;  // by several nodes, of which this one has its part
};

// Loads weights, and of masters, moments and counters what this process has. REQUIRES: nothing runs, all weights are
// settled, and the checkpoint was compared with model and optimizer.
void load_fused(const StoredCheckpoint& stored, const ModelNames& names, const WeightPlaces& places,
                const FusedTarget& target);

}  // namespace roundpipe
