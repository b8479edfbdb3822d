#pragma once

#include <cstdint>
#include <vector>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/call/execution_record.h>

namespace roundpipe::runtime {

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
