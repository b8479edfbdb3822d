#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <roundpipe/device/device_spec.h>
#include <roundpipe/device/event.h>
#include <roundpipe/device/health.h>

namespace roundpipe::device {

// Bytes of device memory. `limit_bytes`: 0 = no known cap. `allocated_bytes`: the sum of all allocations so far.
struct MemoryStats {
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t limit_bytes = 0;
  int64_t allocated_bytes = 0;
};

// As long as a scope lives, its thread issues work to one queue: allocations count against the device, and on an
// accelerator, the queue's stream is current. A scope is destroyed on the thread that made it, innermost first.
class QueueScope {
 public:
  QueueScope() = default;
  QueueScope(const QueueScope&) = delete;
  QueueScope& operator=(const QueueScope&) = delete;
  virtual ~QueueScope() = default;
};

// One copy. Both sides have the same dtype and sizes, and one side is on the host.
struct Piece {
  at::Tensor dst;
  at::Tensor src;
  // Fires when its bytes have arrived; stays pending if they never do. May be null.
  EventPtr arrived = nullptr;
};

// How transfers use a device's link.
struct LinkOptions {
  int64_t chunk_bytes = 64'000'000;  // transfers are cut into pieces of at most this size; 0 = not cut
  bool first_come = false;           // transfers run in the order of their requests, whatever their class
};

// An in-order stream of work for one device. One thread issues to a queue. The three queues of a device run in
// parallel. A virtual queue does its work on the issuing thread.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual std::unique_ptr<QueueScope> enter() = 0;

  // Copies `src` to `dst` in queue order. May return before the copy is done: the caller keeps both alive until an
  // event signalled later has fired. REQUIRES: inside enter(); same dtype and sizes.
  virtual void copy(const at::Tensor& dst, const at::Tensor& src) = 0;

  // Fires `event` when all work issued to this queue so far is done. If the queue cannot tell, waits until its work has
  // ended and fails `event`; otherwise it does not block. Never throws. Events of one queue fire in order. On
  // compute(), the event's time_ms() is when the device reached this point, even if the host issues far ahead.
  virtual void signal(EventPtr event) = 0;
  // Signals a new event and returns it.
  EventPtr mark();

  // Tells the allocator that this queue's work reads or writes `tensor`, which was made in another queue's scope.
  virtual void uses(const at::Tensor& tensor) = 0;

  // Occupies this queue for `duration_ms` without computing (emulated layers).
  virtual void emulate(double duration_ms) = 0;
};

// One worker's device: a place to compute, with both directions of its link to the host.
//
// A device fails when its queues return errors that do not go away; then they throw DeviceError, or fail their events
// with it, from then on. Errors of the code that runs on it, such as a lack of memory, are no failures.
// Thread safety: memory(), health(), inject() and release_hang() from any thread; for the queues see Queue.
class Device {
 public:
  virtual ~Device() = default;
  const std::string& name() const { return name_; }
  const LinkOptions& link_options() const { return link_options_; }
  // The torch device of this device's tensors: "cpu" for virtual devices.
  c10::Device torch_device() const { return torch_device_; }
  bool is_virtual() const { return torch_device_.is_cpu(); }
  // May be used after the device is gone.
  const std::shared_ptr<Health>& health() const { return health_; }
  // The longest time that one microbatch or one copy may take; 0 = no limit.
  double watchdog_ms() const { return watchdog_ms_; }
  // Of frozen weights that stay here from job to job, at most; below 0 = as many as find room.
  int64_t most_resident_bytes() const { return most_resident_bytes_; }

  // Called by the thread of compute(), inside its scope, before it computes a microbatch. Throws DeviceError if the
  // device has failed.
  virtual void begin_microbatch() { health_->check(); }
  // Sets a fault, beside those of the spec. Throws std::invalid_argument if the device is not virtual.
  virtual void inject(const Fault& fault);
  // Lets a thread that hangs because of a fault go on.
  virtual void release_hang() {}
  // Whether a thread hangs because of a fault.
  virtual bool hangs() const { return false; }

  virtual Queue& compute() = 0;
  virtual Queue& upload() = 0;    // host to device
  virtual Queue& download() = 0;  // device to host

  virtual MemoryStats memory() const = 0;
  // MemoryStats::limit_bytes, without a query to the allocator.
  virtual int64_t memory_limit_bytes() const = 0;
  virtual void reset_peak_memory() = 0;
  // Lowers the cap to `limit_bytes` (> 0). Does nothing if it is lower already.
  virtual void limit_memory(int64_t limit_bytes) = 0;

  // Whether copies run on the cores that compute, so that waiting for a copy costs no compute time.
  virtual bool copies_on_compute_cores() const { return false; }

  // Whether host buffers of copies should be page-locked for this device.
  virtual bool wants_pinned_host_memory() const = 0;

  // Intra-op threads of work on compute(); 0 = as many as the process uses. Another number changes the order of some
  // sums, and so their last bits.
  virtual int threads() const { return 0; }

  // Fills `tensor` with NaN in debug mode. Called when its memory is released, to expose uses by mistake.
  virtual void poison(const at::Tensor& tensor) = 0;

 protected:
  Device(const DeviceSpec& spec, c10::Device torch_device)
      : name_(spec.name()),
        link_options_{spec.chunk_bytes, spec.first_come},
        torch_device_(torch_device),
        watchdog_ms_(spec.watchdog_ms),
        most_resident_bytes_(spec.resident_bytes),
        health_(std::make_shared<Health>(name_)) {}

 private:
  std::string name_;
  LinkOptions link_options_;
  c10::Device torch_device_;
  double watchdog_ms_;
  int64_t most_resident_bytes_;
  std::shared_ptr<Health> health_;
};

}  // namespace roundpipe::device
