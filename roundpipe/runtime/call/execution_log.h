#pragma once

#include <cstdint>
#include <vector>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/mutex.h>
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

// The time that one layer took on a device for one microbatch, by the device's own clock, and what it put out.
struct LayerTime {
  int layer;
  int device;
  bool backward;
  double ms;
  int64_t output_bytes = 0;  // of a forward
};

// The records of one call so far. Thread safety: any thread.
class ExecutionLog {
 public:
  void add(const LayerTime& time) {
    const MutexLock lock(mutex_);
    layer_times_.push_back(time);
  }
  std::vector<LayerTime> layer_times() const {
    require_own_process();
    const MutexLock lock(mutex_);
    return layer_times_;
  }
  void add(const ExecutionRecord& record) {
    const MutexLock lock(mutex_);
    records_.push_back(record);
  }
  std::vector<ExecutionRecord> records() const {
    require_own_process();
    const MutexLock lock(mutex_);
    return records_;
  }

 private:
  mutable Mutex mutex_;
  std::vector<ExecutionRecord> records_ ROUNDPIPE_GUARDED_BY(mutex_);
  std::vector<LayerTime> layer_times_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::runtime
