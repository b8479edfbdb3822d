#pragma once

#include <cstdint>

namespace roundpipe::device {

// Page-locks host memory, so that devices copy directly from and to it.
// Thread safety: any thread.
class PageLocker {
 public:
  virtual ~PageLocker() = default;

  // Locks `size_bytes` starting at `data`, both multiples of a page. The pages are made present first, so this may take
  // long. Returns false, with nothing locked, if the system refuses.
  virtual bool lock(void* data, int64_t size_bytes) = 0;

  // Undoes one lock() of exactly these bytes. Does nothing if the accelerator's runtime has shut down already.
  virtual void unlock(void* data, int64_t size_bytes) noexcept = 0;
};

}  // namespace roundpipe::device
