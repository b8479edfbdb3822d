#pragma once

#include <array>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/device/device.h>

namespace roundpipe::memory {

// A device's two places for weights: one for the running job, one for the next.
//
// The slots are the two ends of one arena, which has room for two consecutive jobs. Jobs take alternate ends, so
// nothing is allocated once the arena has its size. The arena grows only while no slot is held. After a device has run
// out of memory, each slot has memory of its own, see separate(), so that the next job's weights can be evicted.
//
// A slot is released when the job's compute and every transfer out of the slot are done. In debug mode, it is then
// filled with NaN.
// Thread safety: expect, try_acquire and release from any thread; buffer(), drop() and separate() by the holder. Device
// memory is never allocated or written under the lock, so nobody waits for that.
class WeightSlots {
 public:
  static constexpr int kSlots = 2;
  explicit WeightSlots(device::Device& device) : device_(device) {}

  // Sets the most bytes that two consecutive future jobs need together.
  void expect(int64_t pair_bytes);

  // Takes a free slot without blocking. Returns -1 if both are held, if the arena has no room for a second slot of
  // `size_bytes`, or if a second slot would leave less than `reserve_bytes` under the device's memory cap.
  int try_acquire(int64_t size_bytes, int64_t reserve_bytes);

  // Returns the slot's memory, uint8 [size_bytes]. REQUIRES: the slot is held, acquired with the same `size_bytes`; the
  // device's scope is entered.
  at::Tensor buffer(int slot, int64_t size_bytes);

  void release(int slot);

  // Whether the slots are still the two ends of one arena.
  bool together() const;
  // From now on, each slot has memory of its own, which buffer() allocates and keeps for jobs of about that size. The
  // arena's contents are lost; its memory is released with the last tensor in it. Returns false if the slots were
  // separate already.
  bool separate();
  // Drops a held slot's own memory. The slot stays held, and the next buffer() allocates new memory. Returns false if
  // the slot had none.
  bool drop(int slot);
  // Drops memory that no held slot needs. Returns false if there was none.
  bool drop_idle();

 private:
  bool none_held() const ROUNDPIPE_REQUIRES(mutex_);
  int64_t place_of(int slot, int64_t size_bytes) const ROUNDPIPE_REQUIRES(mutex_);
  int acquire_end(int64_t size_bytes, int64_t reserve_bytes, at::Tensor& dropped) ROUNDPIPE_REQUIRES(mutex_);
  int acquire_own(int64_t size_bytes, int64_t reserve_bytes, at::Tensor& dropped) ROUNDPIPE_REQUIRES(mutex_);
  // Puts `buffer` into the slot and returns the previous buffer.
  at::Tensor exchange(int slot, at::Tensor buffer);

  device::Device& device_;
  mutable Mutex mutex_;
  std::array<bool, kSlots> held_ ROUNDPIPE_GUARDED_BY(mutex_){};
  std::array<int64_t, kSlots> sizes_ ROUNDPIPE_GUARDED_BY(mutex_){};  // of held slots
  int64_t expected_bytes_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  bool together_ ROUNDPIPE_GUARDED_BY(mutex_) = true;
  at::Tensor arena_ ROUNDPIPE_GUARDED_BY(mutex_);  // made by the first buffer()
  int64_t arena_bytes_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  std::array<at::Tensor, kSlots> buffers_ ROUNDPIPE_GUARDED_BY(mutex_);  // if the slots are separate
};

}  // namespace roundpipe::memory
