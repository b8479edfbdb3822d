#pragma once

#include <memory>

#include <roundpipe/core/clock.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/device/device.h>

namespace roundpipe::device {

// Books transfers on a link of `gb_per_s`. All users share the link: their transfers queue behind each other.
// Thread safety: any thread.
class LinkThrottle {
 public:
  explicit LinkThrottle(double gb_per_s) : bytes_per_ms_(gb_per_s * 1e6) {}

  // Books `size_bytes`, which are ready at `from`. Returns when the last byte has passed the link.
  Clock::time_point book(int64_t size_bytes, Clock::time_point from = Clock::now());

  double bytes_per_ms() const { return bytes_per_ms_; }

 private:
  const double bytes_per_ms_;
  Mutex mutex_;
  Clock::time_point free_at_ ROUNDPIPE_GUARDED_BY(mutex_){};
};

// Makes a device from host threads. Its queues work on the threads that issue to them, its memory is host memory that
// counts against a cap of its own, and its link makes real copies, slowed to link_gb_per_s if that is set.
// `host` is the bandwidth that all devices share; null = not throttled.
std::unique_ptr<Device> make_virtual_device(const DeviceSpec& spec, std::shared_ptr<LinkThrottle> host);

}  // namespace roundpipe::device
