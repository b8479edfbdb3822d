#pragma once

#include <cstdint>

namespace roundpipe {

// The steps of a run with a GradScaler that changed nothing because a gradient was inf or NaN, and when that leads
// nowhere. Each such step halves the scale of the losses. Mean losses, scaled by 1 or less, have gradients far below
// the largest number of float16, so a step that overflows even then has values in its layers that do not fit float16,
// which no scale changes. Thread safety: one thread.
class SkippedSteps {
 public:
  // The scale of losses from which on a step that overflows ends the run.
  static constexpr double kLeastScale = 1;

  // `before`: how many there were before the run went on.
  explicit SkippedSteps(int64_t before = 0) : count_(before) {}

  // Counts a step, if it was skipped. `scale`: that of its losses. Throws Error if the run cannot go on.
  void add(int64_t step, bool skipped, double scale);
  int64_t count() const { return count_; }

 private:
  int64_t count_;
};

}  // namespace roundpipe
