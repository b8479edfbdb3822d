#include <roundpipe/memory/host_arena.h>

#include <pthread.h>

#include <algorithm>
#include <array>
#include <atomic>

#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>

#include <roundpipe/core/bytes.h>
#include <roundpipe/device/accelerator/page_lock.h>

namespace roundpipe::memory {

HostArena::HostArena(std::unique_ptr<SegmentSource> source, Empty empty) : source_(std::move(source)), empty_(empty) {}

at::Tensor HostArena::allocate(int64_t size_bytes) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  if (size_bytes == 0) return at::empty({0}, options);
  const int64_t taken_bytes = align_up(size_bytes, kAlignment_bytes);
  std::byte* piece = nullptr;
  {
    const MutexLock lock(mutex_);
    piece = take_free(taken_bytes);
    if (piece != nullptr) stats_.asked_bytes += size_bytes;
  }
  if (piece == nullptr) {
    const MutexLock growing(growing_);
    {
      // Another thread may have made a segment meanwhile and left room in it.
      const MutexLock lock(mutex_);
      piece = take_free(taken_bytes);
      if (piece != nullptr) stats_.asked_bytes += size_bytes;
    }
    if (piece == nullptr) {
      Segment segment = acquire(taken_bytes);
      const MutexLock lock(mutex_);
      piece = take_new(std::move(segment), taken_bytes);
      stats_.asked_bytes += size_bytes;
    }
  }
  const std::array sizes{size_bytes};
  auto maker = at::for_blob(piece, sizes);
  maker.options(options).deleter(
      [this, size_bytes](void* data) { give_back(static_cast<std::byte*>(data), size_bytes); });
  // A step's tensor may reach the user, who can resize it like any other tensor.
  if (empty_ == Empty::kKept) maker.allocator(c10::GetCPUAllocator()).resizeable_storage();
  return maker.make_tensor();
}

Segment HostArena::acquire(int64_t size_bytes) {
  int64_t reserved_bytes = 0;
  std::vector<Segment> unused;
  if (empty_ == Empty::kKept) {
    const MutexLock lock(mutex_);
    const int64_t most_bytes = std::max(most_used_bytes_, used_bytes_ + size_bytes);
    unused = take_unused(most_bytes + most_bytes / 2 - size_bytes);
  }
  for (Segment& segment : unused) source_->release(std::move(segment));
  {
    const MutexLock lock(mutex_);
    reserved_bytes = stats_.reserved_bytes;
  }
  try {
    return source_->acquire(size_bytes, reserved_bytes);
  } catch (const OutOfHostMemory&) {
    trim_values();
    return source_->acquire(size_bytes, reserved_bytes);
  }
}

std::vector<Segment> HostArena::take_unused(int64_t limit_bytes) {
  std::vector<Segment> unused;
  for (auto held = segments_.begin(); held != segments_.end() && stats_.reserved_bytes > limit_bytes;) {
    const auto next = std::next(held);
    if (held->second.used_bytes == 0) unused.push_back(take_out(held));
    held = next;
  }
  return unused;
}

Segment HostArena::take_out(std::map<std::byte*, Held>::iterator held) {
  Segment segment = std::move(held->second.segment);
  segments_.erase(held);
  if (segment.shared) remove_free(free_by_place_.find(segment.data));
  stats_.reserved_bytes -= segment.size_bytes;
  if (segment.locked) stats_.locked_bytes -= segment.size_bytes;
  return segment;
}

void HostArena::trim() noexcept {
  std::vector<Segment> unused;
  {
    const MutexLock lock(mutex_);
    most_used_bytes_ = used_bytes_;
    unused = take_unused(0);
  }
  for (Segment& segment : unused) source_->release(std::move(segment));
}

HostArenaStats HostArena::stats() const {
  const MutexLock lock(mutex_);
  return stats_;
}

std::map<std::byte*, HostArena::Held>::iterator HostArena::holder_of(std::byte* data) {
  return std::prev(segments_.upper_bound(data));
}

void HostArena::remove_free(std::map<std::byte*, int64_t>::iterator range) {
  free_by_size_.erase({range->second, range->first});
  free_by_place_.erase(range);
}

void HostArena::count_taken(int64_t size_bytes) {
  ++stats_.pieces;
  used_bytes_ += size_bytes;
  most_used_bytes_ = std::max(most_used_bytes_, used_bytes_);
}

std::byte* HostArena::take_free(int64_t size_bytes) {
  const auto best = free_by_size_.lower_bound({size_bytes, nullptr});
  if (best == free_by_size_.end()) return nullptr;
  const auto [range_bytes, data] = *best;
  remove_free(free_by_place_.find(data));
  holder_of(data)->second.used_bytes += size_bytes;
  count_taken(size_bytes);
  if (range_bytes > size_bytes) add_free(data + size_bytes, range_bytes - size_bytes);
  return data;
}

std::byte* HostArena::take_new(Segment segment, int64_t size_bytes) {
  stats_.reserved_bytes += segment.size_bytes;
  if (segment.locked) stats_.locked_bytes += segment.size_bytes;
  count_taken(size_bytes);
  if (empty_ == Empty::kKept) segment.shared = true;
  std::byte* const data = segment.data;
  const int64_t rest_bytes = segment.shared ? segment.size_bytes - size_bytes : 0;
  segments_.emplace(data, Held{std::move(segment), size_bytes});
  if (rest_bytes > 0) add_free(data + size_bytes, rest_bytes);
  return data;
}

void HostArena::add_free(std::byte* data, int64_t size_bytes) {
  // Segments may be adjacent, but ranges of two segments must not merge.
  const Segment& segment = holder_of(data)->second.segment;
  auto next = free_by_place_.lower_bound(data);
  if (next != free_by_place_.end() && next->first == data + size_bytes &&
      next->first < segment.data + segment.size_bytes) {
    size_bytes += next->second;
    remove_free(next++);
  }
  if (next != free_by_place_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == data && before->first >= segment.data) {
      data = before->first;
      size_bytes += before->second;
      remove_free(before);
    }
  }
  free_by_place_.emplace(data, size_bytes);
  free_by_size_.emplace(size_bytes, data);
}

void HostArena::give_back(std::byte* data, int64_t asked_bytes) noexcept {
  const int64_t taken_bytes = align_up(asked_bytes, kAlignment_bytes);
  Segment unused;
  {
    const MutexLock lock(mutex_);
    stats_.asked_bytes -= asked_bytes;
    --stats_.pieces;
    used_bytes_ -= taken_bytes;
    const auto holder = holder_of(data);
    Held& held = holder->second;
    held.used_bytes -= taken_bytes;
    if (held.segment.shared) add_free(data, taken_bytes);
    if (held.used_bytes > 0 || empty_ == Empty::kKept) return;
    unused = take_out(holder);
  }
  source_->release(std::move(unused));
}

namespace {

std::unique_ptr<SegmentSource> locking_source() {
  if (device::PageLocker* const locker = device::runtime_page_locker()) return make_mapped_source(locker);
  const auto type = at::accelerator::getAccelerator(false);
  if (type && at::accelerator::deviceCount() > 0) return make_pinned_source(at::getHostAllocator(*type));
  return make_unlockable_source();
}

}  // namespace

// Leaked on purpose: the last tensor may be freed after everything else. A fork waits until no thread is in the middle
// of the bookkeeping, so that the child finds it consistent.
HostArena* HostArena::made_fork_safe(std::unique_ptr<SegmentSource> source, Empty empty) {
  static Mutex mutex;
  static auto* const arenas = new std::vector<HostArena*>;  // protected by mutex
  constexpr auto lock_all = []() ROUNDPIPE_NOT_ANALYZED {
    mutex.lock();
    for (HostArena* arena : *arenas) {
      arena->growing_.lock();
      arena->mutex_.lock();
    }
  };
  constexpr auto unlock_all = []() ROUNDPIPE_NOT_ANALYZED {
    for (HostArena* arena : *arenas) {
      arena->mutex_.unlock();
      arena->growing_.unlock();
    }
    mutex.unlock();
  };
  const MutexLock lock(mutex);
  if (arenas->empty()) pthread_atfork(lock_all, unlock_all, unlock_all);
  arenas->push_back(new HostArena(std::move(source), empty));
  return arenas->back();
}

HostArena& HostArena::pageable() {
  static HostArena* const arena = made_fork_safe(make_mapped_source(nullptr));
  return *arena;
}

HostArena& HostArena::page_locked() {
  static HostArena* const arena = made_fork_safe(locking_source());
  return *arena;
}

namespace {

std::atomic<HostArena*> locked_values = nullptr;  // null until it is first used

}  // namespace

HostArena& HostArena::values(bool page_locked) {
  static HostArena* const pageable = made_fork_safe(make_mapped_source(nullptr), Empty::kKept);
  if (!page_locked) return *pageable;
  static HostArena* const locked = locked_values = made_fork_safe(locking_source(), Empty::kKept);
  return *locked;
}

void HostArena::trim_values() noexcept {
  values(false).trim();
  if (HostArena* const locked = locked_values.load()) locked->trim();
}

at::Tensor empty_strided(HostArena& arena, at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto size_bytes =
      static_cast<int64_t>(at::detail::computeStorageNbytes(sizes, strides, c10::elementSize(dtype)));
  at::Tensor tensor = at::empty({0}, at::TensorOptions().dtype(dtype));
  return tensor.set_(arena.allocate(size_bytes).storage(), 0, sizes, strides);
}

HostArenaStats host_arena_stats() {
  HostArenaStats sum;
  for (const HostArena* arena :
       {&HostArena::pageable(), &HostArena::page_locked(), &HostArena::values(false), locked_values.load()}) {
    if (arena == nullptr) continue;
    const HostArenaStats stats = arena->stats();
    sum.asked_bytes += stats.asked_bytes;
    sum.reserved_bytes += stats.reserved_bytes;
    sum.locked_bytes += stats.locked_bytes;
    sum.pieces += stats.pieces;
  }
  return sum;
}

}  // namespace roundpipe::memory
