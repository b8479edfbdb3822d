#include <roundpipe/memory/weight_slots.h>

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/memory_rules.h>

namespace roundpipe::memory {

namespace {

// Whether a buffer is kept for a stage of `size_bytes`. A much larger one would waste memory.
bool fits(const at::Tensor& buffer, int64_t size_bytes) {
  constexpr int64_t kSlack = 16;
  return buffer.defined() && buffer.numel() >= size_bytes && buffer.numel() <= size_bytes + size_bytes / kSlack;
}

at::Tensor bytes_on(const device::Device& device, int64_t size_bytes) {
  return at::empty({size_bytes}, at::TensorOptions().dtype(at::kByte).device(device.torch_device()));
}

}  // namespace

void WeightSlots::expect(int64_t pair_bytes) {
  const MutexLock lock(mutex_);
  expected_bytes_ = pair_bytes;
}

bool WeightSlots::none_held() const { return std::ranges::count(held_, true) == 0; }

int64_t WeightSlots::place_of(int slot, int64_t size_bytes) const {
  return slot == 0 ? 0 : (arena_bytes_ - size_bytes) / kBlockAlignment_bytes * kBlockAlignment_bytes;
}

int WeightSlots::try_acquire(int64_t size_bytes, int64_t reserve_bytes) {
  at::Tensor dropped;  // after the lock
  const MutexLock lock(mutex_);
  const int slot =
      together_ ? acquire_end(size_bytes, reserve_bytes, dropped) : acquire_own(size_bytes, reserve_bytes, dropped);
  if (slot < 0) return -1;
  held_[slot] = true;
  sizes_[slot] = size_bytes;
  return slot;
}

int WeightSlots::acquire_end(int64_t size_bytes, int64_t reserve_bytes, at::Tensor& dropped) {
  const int64_t limit_bytes = device_.memory_limit_bytes();
  const auto leaves_reserve = [&](int64_t bytes) { return fits_cap(bytes + reserve_bytes, limit_bytes); };
  if (none_held()) {
    const int64_t pair_bytes = std::max(expected_bytes_, size_bytes);
    const int64_t wanted_bytes = leaves_reserve(pair_bytes) ? pair_bytes : size_bytes;
    // A larger arena stays, unless it leaves this job too little memory.
    if (arena_bytes_ < wanted_bytes || !leaves_reserve(arena_bytes_)) {
      if (arena_bytes_ != wanted_bytes) dropped = std::exchange(arena_, {});
      arena_bytes_ = wanted_bytes;
    }
    return 0;
  }
  const int slot = held_[0] ? 1 : 0;
  if (held_[slot] || !leaves_reserve(arena_bytes_)) return -1;
  const bool has_room = slot == 1 ? arena_bytes_ >= size_bytes && place_of(1, size_bytes) >= sizes_[0]
                                  : size_bytes <= place_of(1, sizes_[1]);
  return has_room ? slot : -1;
}

int WeightSlots::acquire_own(int64_t size_bytes, int64_t reserve_bytes, at::Tensor& dropped) {
  int chosen = -1;
  for (int slot = 0; slot < kSlots; ++slot) {
    const bool better = chosen < 0 || (!fits(buffers_[chosen], size_bytes) && fits(buffers_[slot], size_bytes));
    if (!held_[slot] && better) chosen = slot;
  }
  if (chosen < 0) return -1;
  at::Tensor& other = buffers_[1 - chosen];
  const int64_t other_bytes = other.defined() ? other.numel() : 0;
  const int64_t own_bytes = fits(buffers_[chosen], size_bytes) ? buffers_[chosen].numel() : size_bytes;
  if (!fits_cap(other_bytes + own_bytes + reserve_bytes, device_.memory_limit_bytes())) {
    if (held_[1 - chosen]) return -1;
    // A job that runs alone must not fail because of the other slot's idle buffer.
    if (size_bytes > 0) dropped = std::exchange(other, {});
  }
  return chosen;
}

at::Tensor WeightSlots::buffer(int slot, int64_t size_bytes) {
  bool together = false;
  int64_t arena_bytes = 0;
  {
    const MutexLock lock(mutex_);
    together = together_;
    arena_bytes = arena_bytes_;  // constant while a slot is held
    if (together && arena_.defined()) return arena_.narrow(0, place_of(slot, size_bytes), size_bytes);
    if (!together && fits(buffers_[slot], size_bytes)) return buffers_[slot].narrow(0, 0, size_bytes);
  }
  if (!together) {
    exchange(slot, {});
    at::Tensor buffer = bytes_on(device_, size_bytes);
    exchange(slot, buffer);
    return buffer;
  }
  at::Tensor arena = bytes_on(device_, arena_bytes);
  const MutexLock lock(mutex_);
  if (!arena_.defined()) arena_ = std::move(arena);
  return arena_.narrow(0, place_of(slot, size_bytes), size_bytes);
}

void WeightSlots::release(int slot) {
  at::Tensor buffer;
  {
    const MutexLock lock(mutex_);
    buffer = buffers_[slot];
    if (together_ && arena_.defined()) buffer = arena_.narrow(0, place_of(slot, sizes_[slot]), sizes_[slot]);
  }
  device_.poison(buffer);
  buffer.reset();
  const MutexLock lock(mutex_);
  held_[slot] = false;
}

bool WeightSlots::together() const {
  const MutexLock lock(mutex_);
  return together_;
}

bool WeightSlots::separate() {
  at::Tensor arena;  // after the lock
  const MutexLock lock(mutex_);
  arena = std::exchange(arena_, {});
  return std::exchange(together_, false);
}

bool WeightSlots::drop(int slot) { return exchange(slot, {}).defined(); }

bool WeightSlots::drop_idle() {
  at::Tensor arena;
  std::array<at::Tensor, kSlots> dropped;
  const MutexLock lock(mutex_);
  if (none_held()) arena = std::exchange(arena_, {});
  for (int slot = 0; slot < kSlots; ++slot) {
    if (!held_[slot]) dropped[slot] = std::exchange(buffers_[slot], {});
  }
  return arena.defined() || std::ranges::any_of(dropped, [](const at::Tensor& buffer) { return buffer.defined(); });
}

at::Tensor WeightSlots::exchange(int slot, at::Tensor buffer) {
  const MutexLock lock(mutex_);
  return std::exchange(buffers_[slot], std::move(buffer));
}

}  // namespace roundpipe::memory
