#pragma once

#include <chrono>

namespace roundpipe {

using Clock = std::chrono::steady_clock;

// Milliseconds of the monotonic clock. Only differences are meaningful.
inline double now_ms() { return std::chrono::duration<double, std::milli>(Clock::now().time_since_epoch()).count(); }

inline Clock::duration from_ms(double ms) {
  return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::milli>(ms));
}

}  // namespace roundpipe
