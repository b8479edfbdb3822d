#pragma once

#include <roundpipe/schedule/plan.h>

namespace roundpipe::runtime {

// The times of one execution of a stage on a microbatch, in Clock milliseconds: when the device ran it, not when the
// host issued it. Records of one device do not overlap.
struct ExecutionRecord {
  schedule::Phase phase;
  schedule::Range layers;
  int microbatch;
  int device;
  double start_ms;
  double end_ms;
  double recomputed_ms = 0;  // when the recompute of a backward ended; 0 for other phases
  double waited_ms = 0;      // how long the device then was idle, until the gradient arrived
  double weights_ms = 0;     // how long it was idle between layers, until the next one's weights arrived

  // The time in which it computed.
  double busy_ms() const { return end_ms - start_ms - waited_ms - weights_ms; }
};

}  // namespace roundpipe::runtime
