#pragma once

#include <memory>
#include <mutex>

#include <roundpipe/core/clock.h>
#include <roundpipe/device/device.h>

namespace roundpipe::device {

// A link that passes `gb_per_s`, shared by whoever charges it: transfers queue up behind each other.
// Thread safety: any thread.
class LinkThrottle {
 public:
  explicit LinkThrottle(double gb_per_s) : bytes_per_ms_(gb_per_s * 1e6) {}

  // Books `size_bytes`, which are there at `from`, on the link and returns when the last of them is through.
  Clock::time_point book(int64_t size_bytes, Clock::time_point from = Clock::now());

  double bytes_per_ms() const { return bytes_per_ms_; }

 private:
  const double bytes_per_ms_;
  std::mutex mutex_;
  Clock::time_point free_at_{};  // protected by mutex_
};

// A device made of host threads: its queues work on the threads that issue to them, its memory is host memory
// counted against its own cap, its link is a real copy, slowed to link_gb_per_s where given.
// `host` is the bandwidth all devices share; null = not throttled.
std::unique_ptr<Device> make_virtual_device(const DeviceSpec& spec, std::shared_ptr<LinkThrottle> host);

}  // namespace roundpipe::device
