#pragma once

#include <array>
#include <condition_variable>
#include <mutex>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/device.h>

namespace roundpipe::memory {

// The two places of a device that hold weights: one for the job that runs, one for the job that is next.
//
// A slot is one flat buffer, reused by stages of about its size; for others it is made anew. It is free again when the
// job's compute and every transfer out of it are done; in debug mode it is then filled with NaN.
// Thread safety: acquire and release from any thread; buffer() and drop() by the holder. No device memory is asked for
// or written to under the lock, so nobody waits for that.
class WeightSlots {
 public:
  static constexpr int kSlots = 2;
  explicit WeightSlots(device::Device& device) : device_(device) {}

  // Takes a free slot without blocking; -1 when both are in use, or when a second one of `size_bytes` would leave
  // less than `reserve_bytes` under the device's memory cap.
  int try_acquire(int64_t size_bytes, int64_t reserve_bytes);

  // The slot's memory, uint8, at least `size_bytes`. REQUIRES: the slot is held; the device's scope is entered.
  at::Tensor buffer(int slot, int64_t size_bytes);

  void release(int slot);

  // Gives the memory of a held slot back, which stays held: the next buffer() takes new memory. False when there
  // was none.
  bool drop(int slot);
  // Gives the memory of slots back that nobody holds; false when there was none.
  bool drop_idle();

 private:
  // Puts `buffer` into the slot and returns what was there.
  at::Tensor exchange(int slot, at::Tensor buffer);

  device::Device& device_;
  std::mutex mutex_;
  std::array<bool, kSlots> held_{};         // protected by mutex_
  std::array<at::Tensor, kSlots> buffers_;  // protected by mutex_
};

}  // namespace roundpipe::memory
