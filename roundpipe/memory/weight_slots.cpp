#include <roundpipe/memory/weight_slots.h>

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

namespace roundpipe::memory {

namespace {

// Whether a buffer is kept for a stage of `size_bytes`: one that is much larger would hold memory for nothing.
bool fits(const at::Tensor& buffer, int64_t size_bytes) {
  constexpr int64_t kSlack = 16;
  return buffer.defined() && buffer.numel() >= size_bytes && buffer.numel() <= size_bytes + size_bytes / kSlack;
}

}  // namespace

int WeightSlots::try_acquire(int64_t size_bytes, int64_t reserve_bytes) {
  std::array<at::Tensor, kSlots> dropped;
  std::lock_guard lock(mutex_);
  int held = 0;
  int chosen = -1;
  for (int slot = 0; slot < kSlots; ++slot) {
    if (held_[slot]) {
      ++held;
    } else if (chosen < 0 || (!fits(buffers_[chosen], size_bytes) && fits(buffers_[slot], size_bytes))) {
      chosen = slot;
    }
  }
  if (chosen < 0) return -1;
  if (held > 0) {
    const int64_t limit_bytes = device_.memory_limit_bytes();
    const int64_t own_bytes = fits(buffers_[chosen], size_bytes) ? buffers_[chosen].numel() : size_bytes;
    int64_t others_bytes = 0;
    for (int slot = 0; slot < kSlots; ++slot) {
      if (slot != chosen && buffers_[slot].defined()) others_bytes += buffers_[slot].numel();
    }
    const int64_t weights_bytes = others_bytes + own_bytes;
    if (limit_bytes > 0 && weights_bytes + reserve_bytes > limit_bytes) return -1;
  } else if (size_bytes > 0) {
    // Alone: the other slot's idle buffer must not be what stands in this job's way.
    for (int slot = 0; slot < kSlots; ++slot) {
      const int64_t limit_bytes = device_.memory_limit_bytes();
      if (slot != chosen && buffers_[slot].defined() && limit_bytes > 0 &&
          buffers_[slot].numel() + size_bytes + reserve_bytes > limit_bytes) {
        dropped[slot] = std::exchange(buffers_[slot], {});
      }
    }
  }
  held_[chosen] = true;
  return chosen;
}

at::Tensor WeightSlots::buffer(int slot, int64_t size_bytes) {
  {
    std::lock_guard lock(mutex_);
    if (fits(buffers_[slot], size_bytes)) return buffers_[slot];
  }
  exchange(slot, {});
  at::Tensor buffer = at::empty({size_bytes}, at::TensorOptions().dtype(at::kByte).device(device_.torch_device()));
  exchange(slot, buffer);
  return buffer;
}

void WeightSlots::release(int slot) {
  at::Tensor buffer;
  {
    std::lock_guard lock(mutex_);
    buffer = buffers_[slot];
  }
  device_.poison(buffer);
  std::lock_guard lock(mutex_);
  held_[slot] = false;
}

bool WeightSlots::drop(int slot) { return exchange(slot, {}).defined(); }

bool WeightSlots::drop_idle() {
  std::array<at::Tensor, kSlots> dropped;
  std::lock_guard lock(mutex_);
  for (int slot = 0; slot < kSlots; ++slot) {
    if (!held_[slot]) dropped[slot] = std::exchange(buffers_[slot], {});
  }
  return std::any_of(dropped.begin(), dropped.end(), [](const at::Tensor& buffer) { return buffer.defined(); });
}

at::Tensor WeightSlots::exchange(int slot, at::Tensor buffer) {
  std::lock_guard lock(mutex_);
  return std::exchange(buffers_[slot], std::move(buffer));
}

}  // namespace roundpipe::memory
