#include <roundpipe/memory/buffer_pool.h>

#include <ATen/ops/from_blob.h>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/memory/host_arena.h>

namespace roundpipe::memory {

BufferPool::BufferPool(int64_t size_bytes, bool pinned)
    : size_bytes_(size_bytes), pinned_(pinned), shelf_(std::make_shared<Shelf>()) {
  keep(1);
}

void BufferPool::keep(size_t spares) {
  const MutexLock lock(shelf_->mutex);
  shelf_->most_spare = spares;
  shelf_->spare.reserve(spares);  // a piece may come back on any thread, which must not throw
}

at::Tensor BufferPool::take() const {
  at::Tensor piece;
  {
    const MutexLock lock(shelf_->mutex);
    if (!shelf_->spare.empty()) {
      piece = std::move(shelf_->spare.back());
      shelf_->spare.pop_back();
    } else {
      shelf_->most_pieces = std::max(shelf_->most_pieces, ++shelf_->pieces);
    }
  }
  if (!piece.defined()) {
    try {
      piece = (pinned_ ? HostArena::page_locked() : HostArena::pageable()).allocate(size_bytes_);
    } catch (...) {
      const MutexLock lock(shelf_->mutex);
      --shelf_->pieces;
      throw;
    }
  }
  void* data = piece.mutable_data_ptr();
  const auto give_back = [shelf = shelf_, piece](void*) {
    if (is_left_behind()) return;
    const MutexLock lock(shelf->mutex);
    if (shelf->spare.size() < shelf->most_spare) {
      shelf->spare.push_back(piece);
    } else {
      --shelf->pieces;
    }
  };
  return at::from_blob(data, {size_bytes_}, give_back, at::TensorOptions().dtype(at::kByte));
}

int64_t BufferPool::host_bytes() const {
  const MutexLock lock(shelf_->mutex);
  return shelf_->pieces * size_bytes_;
}

int64_t BufferPool::peak_bytes() const {
  const MutexLock lock(shelf_->mutex);
  return shelf_->most_pieces * size_bytes_;
}

}  // namespace roundpipe::memory
