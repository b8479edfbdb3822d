#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>

namespace roundpipe::memory {

// Host memory in pieces of one size. A parameter block's weights and gradients take turns in them. A piece comes back
// when the last tensor in it is destroyed, whoever holds that tensor.
// Thread safety: any thread. Tensors may outlive the pool.
class BufferPool {
 public:
  BufferPool(int64_t size_bytes, bool pinned);

  // Sets how many unused pieces the pool keeps; initially one. Others that come back are released.
  void keep(size_t spares);
  // From now on, the pieces of `other` come back to this pool and count as its own. REQUIRES: the size is the same,
  // and nothing is taken from `other` any more.
  void take_over(const BufferPool& other);

  // Returns uninitialized uint8 [size_bytes]: an unused piece or, without waiting for one, new memory. Throws
  // OutOfHostMemory.
  at::Tensor take() const;

  bool pinned() const { return pinned_; }
  // Bytes of all pieces, in use and kept.
  int64_t host_bytes() const;
  // The maximum of host_bytes() since the pool was made.
  int64_t peak_bytes() const;

 private:
  struct Shelf {
    Mutex mutex;
    std::vector<at::Tensor> spare ROUNDPIPE_GUARDED_BY(mutex);
    size_t most_spare ROUNDPIPE_GUARDED_BY(mutex) = 0;
    int64_t pieces ROUNDPIPE_GUARDED_BY(mutex) = 0;
    int64_t most_pieces ROUNDPIPE_GUARDED_BY(mutex) = 0;
    std::shared_ptr<Shelf> heir ROUNDPIPE_GUARDED_BY(mutex);  // of all that comes back
  };
  static void put_back(const std::shared_ptr<Shelf>& shelf, const at::Tensor& piece);
  const int64_t size_bytes_;
  const bool pinned_;
  const std::shared_ptr<Shelf> shelf_;
};

}  // namespace roundpipe::memory
