#include <roundpipe/memory/buffer_pool.h>

#include <ATen/ops/from_blob.h>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/memory/host_arena.h>

namespace roundpipe::memory {

BufferPool::BufferPool(int64_t size_bytes, bool pinned)
    : size_bytes_(size_bytes), pinned_(pinned), shelf_(std::make_shared<Shelf>()) {}

at::Tensor BufferPool::take() const {
  at::Tensor piece;
  {
    std::lock_guard lock(shelf_->mutex);
    piece = std::move(shelf_->spare);
    if (!piece.defined()) shelf_->most_pieces = std::max(shelf_->most_pieces, ++shelf_->pieces);
  }
  if (!piece.defined()) {
    try {
      piece = (pinned_ ? HostArena::page_locked() : HostArena::pageable()).allocate(size_bytes_);
    } catch (...) {
      std::lock_guard lock(shelf_->mutex);
      --shelf_->pieces;
      throw;
    }
  }
  void* data = piece.mutable_data_ptr();
  const auto give_back = [shelf = shelf_, piece](void*) {
    if (is_left_behind()) return;
    std::lock_guard lock(shelf->mutex);
    if (shelf->spare.defined()) {
      --shelf->pieces;
    } else {
      shelf->spare = piece;
    }
  };
  return at::from_blob(data, {size_bytes_}, give_back, at::TensorOptions().dtype(at::kByte));
}

int64_t BufferPool::host_bytes() const {
  std::lock_guard lock(shelf_->mutex);
  return shelf_->pieces * size_bytes_;
}

int64_t BufferPool::peak_bytes() const {
  std::lock_guard lock(shelf_->mutex);
  return shelf_->most_pieces * size_bytes_;
}

}  // namespace roundpipe::memory
