#pragma once

#include <roundpipe/api/optimizer.h>
#include <roundpipe/runs/weight_places.h>

namespace roundpipe {

// Loads weights, masters, moments and counters of a model that `optimizer` updates. Its options are loaded before.
// REQUIRES: nothing runs, all weights are settled, and the checkpoint was compared with model and optimizer.
void load_fused(const StoredCheckpoint& stored, const ModelNames& names, const WeightPlaces& places,
                Optimizer& optimizer);

}  // namespace roundpipe
