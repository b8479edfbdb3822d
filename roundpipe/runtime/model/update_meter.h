#pragma once

#include <cstdint>

#include <roundpipe/core/mutex.h>

namespace roundpipe::runtime {

// How fast the host's optimizer updates a model's weights: smoothed, later updates count more. Thread safety: any
// thread.
class UpdateMeter {
 public:
  // An update of `weight_bytes` took `ms`.
  void add(int64_t weight_bytes, double ms) {
    const MutexLock lock(mutex_);
    bytes_ = kKept * bytes_ + static_cast<double>(weight_bytes);
    ms_ = kKept * ms_ + ms;
  }
  // 1e9 bytes of weights per second; 0 = not measured.
  double gb_per_s() const {
    const MutexLock lock(mutex_);
    return ms_ >= kLeast_ms ? bytes_ / (ms_ * 1e6) : 0;
  }

 private:
  static constexpr double kKept = 0.99;   // of what was known, with each update of a block
  static constexpr double kLeast_ms = 1;  // less says more about threads than about the optimizer
  mutable Mutex mutex_;
  double bytes_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  double ms_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
};

}  // namespace roundpipe::runtime
