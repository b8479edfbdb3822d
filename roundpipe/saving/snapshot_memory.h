#pragma once

#include <cstdint>

#include <roundpipe/core/mutex.h>

namespace roundpipe::saving {

// What a save holds in host memory beside the state itself, and how long training has waited for it.
// Thread safety: any thread.
class SnapshotMemory {
 public:
  explicit SnapshotMemory(int64_t limit_bytes) : limit_bytes_(limit_bytes) {}

  // Takes `bytes` unless that would exceed the limit.
  bool try_take(int64_t bytes);
  // Takes `bytes`, whatever the limit says.
  void take(int64_t bytes);
  void give_back(int64_t bytes);
  void note_wait(double ms);

  struct Report {
    int64_t most_bytes = 0;      // held at one time
    double longest_wait_ms = 0;  // of an update, or of the caller when a step began
    double total_wait_ms = 0;
  };
  Report report() const;

 private:
  const int64_t limit_bytes_;
  mutable Mutex mutex_;
  int64_t held_bytes_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  Report report_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::saving
