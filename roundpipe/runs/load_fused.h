#pragma once

#include <roundpipe/runs/trained_parts.h>
#include <roundpipe/runs/weight_places.h>

namespace roundpipe {

// Loads weights, and of masters, moments and counters what this process has. `is_shared`: several nodes have the
// optimizer's state together, and this one its part. REQUIRES: nothing runs, all weights are settled, and the
// checkpoint was compared with model and optimizer.
void load_fused(const StoredCheckpoint& stored, const ModelNames& names, const WeightPlaces& places,
                const FusedOptimizer& optimizer, bool is_shared);

}  // namespace roundpipe
