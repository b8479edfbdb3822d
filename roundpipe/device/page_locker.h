#pragma once

#include <cstdint>

namespace roundpipe::device {

// Locks pages of host memory in place, so that devices copy from and to them without a detour.
// Thread safety: any thread.
class PageLocker {
 public:
  virtual ~PageLocker() = default;

  // Locks `size_bytes` from `data` on, both multiples of a page; makes them present first, so it may take long.
  // False when the system refuses; nothing is locked then.
  virtual bool lock(void* data, int64_t size_bytes) = 0;

  // Undoes one lock() of exactly these bytes. Does nothing where the runtime has been shut down already.
  virtual void unlock(void* data, int64_t size_bytes) noexcept = 0;
};

}  // namespace roundpipe::device
