#pragma once

#include <cstdint>

namespace roundpipe {

// By how much the scale of losses moves, and how often.
struct ScaleRule {
  double growth_factor = 2;     // after growth_interval steps without inf or NaN
  double backoff_factor = 0.5;  // after a step with inf or NaN
  int64_t growth_interval = 2000;
};

// What a checkpoint holds of it.
struct ScaleState {
  double scale = 0;  // the result of the latest step
  double front = 0;  // of the next losses
  int64_t growth_tracker = 0;
};

}  // namespace roundpipe
