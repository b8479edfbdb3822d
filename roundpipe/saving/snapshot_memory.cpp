#include <roundpipe/saving/snapshot_memory.h>

#include <algorithm>

namespace roundpipe::saving {

bool SnapshotMemory::try_take(int64_t bytes) {
  const MutexLock lock(mutex_);
  if (held_bytes_ + bytes > limit_bytes_) return false;
  held_bytes_ += bytes;
  report_.most_bytes = std::max(report_.most_bytes, held_bytes_);
  return true;
}

void SnapshotMemory::take(int64_t bytes) {
  const MutexLock lock(mutex_);
  held_bytes_ += bytes;
  report_.most_bytes = std::max(report_.most_bytes, held_bytes_);
}

void SnapshotMemory::give_back(int64_t bytes) {
  const MutexLock lock(mutex_);
  held_bytes_ -= bytes;
}

void SnapshotMemory::note_wait(double ms) {
  const MutexLock lock(mutex_);
  report_.longest_wait_ms = std::max(report_.longest_wait_ms, ms);
  report_.total_wait_ms += ms;
}

SnapshotMemory::Report SnapshotMemory::report() const {
  const MutexLock lock(mutex_);
  return report_;
}

}  // namespace roundpipe::saving
