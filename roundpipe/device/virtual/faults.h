#pragma once

#include <atomic>
#include <string>
#include <vector>

#include <roundpipe/core/mutex.h>
#include <roundpipe/device/emulated_time.h>
#include <roundpipe/device/fault.h>
#include <roundpipe/device/health.h>

namespace roundpipe::device {

// The faults of one virtual device.
// Thread safety: any thread; begin_microbatch() on the device's thread.
class Faults {
 public:
  Faults(std::string device, std::vector<Fault> faults, Health& health)
      : device_(std::move(device)), health_(health), faults_(std::move(faults)) {}

  // A fault whose count starts now.
  void add(Fault fault);
  // Lets a thread that hangs go on, and removes hangs that have not struck yet.
  void release_hang();
  // Whether the device's thread hangs now.
  bool hangs() const;

  // Counts a microbatch, and does what the faults that it meets say. May block.
  void begin_microbatch();
  // Whether copies to the host are wrong now.
  bool wrong_bits() const { return wrong_bits_.load(); }

 private:
  const std::string device_;
  Health& health_;
  std::atomic<bool> wrong_bits_{false};
  EmulatedTime slow_;  // used by the device's thread
  mutable Mutex mutex_;
  Condition changed_;
  std::vector<Fault> faults_ ROUNDPIPE_GUARDED_BY(mutex_);
  int begun_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  bool hangs_ ROUNDPIPE_GUARDED_BY(mutex_) = false;
};

}  // namespace roundpipe::device
