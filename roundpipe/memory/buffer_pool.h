#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::memory {

// Host memory in pieces of one size, which a parameter block's weights and gradients take turns in: a piece comes back
// when the last tensor in it is gone, whoever holds it.
// Thread safety: any thread. Tensors may outlive the pool.
class BufferPool {
 public:
  BufferPool(int64_t size_bytes, bool pinned);

  // From now on so many pieces wait for their next use, others are given back to the system. One before.
  void keep(size_t spares);

  // Uninitialised uint8 [size_bytes]: a piece that has come back, else new memory. Does not block.
  at::Tensor take() const;

  bool pinned() const { return pinned_; }
  // Of all pieces: in use, and kept for the next one who asks.
  int64_t host_bytes() const;
  // The most that host_bytes() has been since the pool was made.
  int64_t peak_bytes() const;

 private:
  struct Shelf {
    std::mutex mutex;
    // Protected by mutex.
    std::vector<at::Tensor> spare;
    size_t most_spare = 0;
    int64_t pieces = 0;
    int64_t most_pieces = 0;
  };
  const int64_t size_bytes_;
  const bool pinned_;
  const std::shared_ptr<Shelf> shelf_;
};

}  // namespace roundpipe::memory
