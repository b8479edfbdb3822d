#include <roundpipe/memory/buffer_pool.h>

#include <algorithm>
#include <utility>

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

void BufferPool::take_over(const BufferPool& other) {
  std::vector<at::Tensor> spare;
  int64_t pieces = 0;
  {
    const MutexLock lock(other.shelf_->mutex);
    other.shelf_->heir = shelf_;
    spare.swap(other.shelf_->spare);
    pieces = std::exchange(other.shelf_->pieces, 0);
  }
  {
    const MutexLock lock(shelf_->mutex);
    shelf_->pieces += pieces;
    shelf_->most_pieces = std::max(shelf_->most_pieces, shelf_->pieces);
  }
  for (const at::Tensor& piece : spare) put_back(shelf_, piece);
}

void BufferPool::put_back(const std::shared_ptr<Shelf>& shelf, const at::Tensor& piece) {
  std::shared_ptr<Shelf> heir;
  {
    const MutexLock lock(shelf->mutex);
    heir = shelf->heir;
    if (!heir && shelf->spare.size() < shelf->most_spare) {
      shelf->spare.push_back(piece);
    } else if (!heir) {
      --shelf->pieces;
    }
  }
  if (heir) put_back(heir, piece);
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
    if (!is_left_behind()) put_back(shelf, piece);
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
