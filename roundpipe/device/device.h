#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <roundpipe/device/device_spec.h>
#include <roundpipe/device/event.h>

namespace roundpipe::device {

// Bytes of device memory. `limit_bytes` 0 = no cap known; `allocated_bytes`: all that was ever asked for.
struct MemoryStats {
  int64_t current_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t limit_bytes = 0;
  int64_t allocated_bytes = 0;
};

// While it lives, the calling thread issues work to one queue: allocations count against the device, and on an
// accelerator the queue's stream is current. Destroyed on the thread that made it, innermost first.
class QueueScope {
 public:
  QueueScope() = default;
  QueueScope(const QueueScope&) = delete;
  QueueScope& operator=(const QueueScope&) = delete;
  virtual ~QueueScope() = default;
};

// One copy: same dtype and sizes, one side on the host.
struct Piece {
  at::Tensor dst;
  at::Tensor src;
};

// How a device's links are used.
struct LinkOptions {
  int64_t chunk_bytes = 64'000'000;  // transfers are cut into pieces of at most so much; 0 = moved whole
  bool first_come = false;           // in the order in which they are asked for, whatever their class
};

// An in-order stream of work of one device. One thread issues to a queue; the three queues of a device run side by
// side. A virtual queue does its work on the issuing thread.
class Queue {
 public:
  virtual ~Queue() = default;
  virtual std::unique_ptr<QueueScope> enter() = 0;

  // Copies `src` to `dst` (same dtype and sizes) in queue order. May return before the copy is done; both stay
  // alive until an event signalled later has fired. REQUIRES: inside enter().
  virtual void copy(const at::Tensor& dst, const at::Tensor& src) = 0;

  // Fires `event` when all work issued to this queue so far is done; fails it when that cannot be known, and nothing
  // runs any more. Never throws; blocks only to see to that. Events of one queue fire in order. On compute(), the
  // event's time_ms() is when the device got there, also where the host issues far ahead.
  virtual void signal(EventPtr event) = 0;
  // Signals a new event, which is nobody else's.
  EventPtr mark();

  // Tells the allocator that `tensor`, made in another queue's scope, is read or written by this queue's work.
  virtual void uses(const at::Tensor& tensor) = 0;

  // Occupies this queue for `duration_ms` without computing (emulated layers).
  virtual void emulate(double duration_ms) = 0;
};

// One worker's device: a place to compute and the two directions of its link to the host.
// Thread safety: memory() from any thread; each queue as Queue says.
class Device {
 public:
  virtual ~Device() = default;
  const std::string& name() const { return name_; }
  const LinkOptions& link_options() const { return link_options_; }
  // Where tensors of this device live for torch: "cpu" for virtual devices.
  c10::Device torch_device() const { return torch_device_; }
  bool is_virtual() const { return torch_device_.is_cpu(); }

  virtual Queue& compute() = 0;
  virtual Queue& upload() = 0;    // host to device
  virtual Queue& download() = 0;  // device to host

  virtual MemoryStats memory() const = 0;
  // MemoryStats::limit_bytes, without asking the allocator for anything.
  virtual int64_t memory_limit_bytes() const = 0;
  virtual void reset_peak_memory() = 0;
  // From now on at most `limit_bytes` (> 0), where the cap is not lower already.
  virtual void limit_memory(int64_t limit_bytes) = 0;

  // Whether copies are work of the very cores that compute, so that to wait for them costs nothing.
  virtual bool copies_on_compute_cores() const { return false; }

  // Whether host buffers of copies should be page-locked for this device.
  virtual bool wants_pinned_host_memory() const = 0;

  // Intra-op threads for what runs on compute(); 0 = as many as the process uses. Fewer change the order of some
  // sums, and with it the last bits.
  virtual int threads() const { return 0; }

  // Called after memory that may still be referenced by mistake is given up: fills it with NaN in debug mode.
  virtual void poison(const at::Tensor& tensor) = 0;

 protected:
  Device(const DeviceSpec& spec, c10::Device torch_device)
      : name_(spec.name()), link_options_{spec.chunk_bytes, spec.first_come}, torch_device_(torch_device) {}

 private:
  std::string name_;
  LinkOptions link_options_;
  c10::Device torch_device_;
};

}  // namespace roundpipe::device
