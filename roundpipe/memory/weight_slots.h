#pragma once

#include <array>
#include <mutex>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/device.h>

namespace roundpipe::memory {

// The two places of a device that hold weights: one for the job that runs, one for the job that is next.
//
// They are the two ends of one arena, which is as large as what two consecutive jobs need together: jobs take alternate
// ends, so nothing is allocated once the arena has its size. It grows while nobody holds a slot. A device that has run
// out of memory gives each slot memory of its own from then on, see separate(), so that what is next can be given up.
//
// A slot is free again when the job's compute and every transfer out of it are done; in debug mode it is then filled
// with NaN.
// Thread safety: expect, acquire and release from any thread; buffer(), drop() and separate() by the holder. No device
// memory is asked for or written to under the lock, so nobody waits for that.
class WeightSlots {
 public:
  static constexpr int kSlots = 2;
  explicit WeightSlots(device::Device& device) : device_(device) {}

  // What two consecutive jobs of those to come need together, at most.
  void expect(int64_t pair_bytes);

  // Takes a free slot without blocking. -1 when both are in use, when a second one of `size_bytes` has no room in the
  // arena, or when it would leave less than `reserve_bytes` under the device's memory cap.
  int try_acquire(int64_t size_bytes, int64_t reserve_bytes);

  // The slot's memory, uint8, `size_bytes` long. REQUIRES: the slot is held, for a job of so much; the device's scope
  // is entered.
  at::Tensor buffer(int slot, int64_t size_bytes);

  void release(int slot);

  // Whether the slots still are two ends of one arena.
  bool together() const;
  // From now on each slot has memory of its own, made by buffer(), and kept for jobs of about its size. False when that
  // was so. What the arena holds is lost, and its memory goes with the last tensor in it.
  bool separate();
  // Gives the memory of a held slot of its own back, which stays held: the next buffer() takes new memory. False when
  // there was none.
  bool drop(int slot);
  // Gives memory back that no held slot needs; false when there was none.
  bool drop_idle();

 private:
  // REQUIRES: mutex_ is held.
  bool none_held() const;
  int64_t place_of(int slot, int64_t size_bytes) const;
  int acquire_end(int64_t size_bytes, int64_t reserve_bytes, at::Tensor& dropped);
  int acquire_own(int64_t size_bytes, int64_t reserve_bytes, at::Tensor& dropped);
  // Puts `buffer` into the slot and returns what was there.
  at::Tensor exchange(int slot, at::Tensor buffer);

  device::Device& device_;
  mutable std::mutex mutex_;
  // Protected by mutex_.
  std::array<bool, kSlots> held_{};
  std::array<int64_t, kSlots> sizes_{};  // of held ones
  int64_t expected_bytes_ = 0;
  bool together_ = true;
  at::Tensor arena_;  // made by the first buffer()
  int64_t arena_bytes_ = 0;
  std::array<at::Tensor, kSlots> buffers_;  // once they are separate
};

}  // namespace roundpipe::memory
