#pragma once

#include <string>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <roundpipe/core/error.h>
#include <roundpipe/kernels/entries.h>

namespace roundpipe::kernels {

// Starts kernels on the devices of one type. Thread safety: any thread.
class ROUNDPIPE_API Launcher {
 public:
  virtual ~Launcher();

  // Why this device runs no kernels, for a warning to its user; empty: it does. Asked before every operator, with the
  // device current. The first call may take seconds, in which the kernels are compiled.
  virtual std::string why_not(c10::DeviceIndex index) = 0;

  // Queues a kernel on a stream of the current device. `arguments`: the entry's struct, not used after the call; what
  // lies at its addresses is used in stream order, and tensors there may be freed as torch's allocator allows.
  // REQUIRES: why_not() is empty. Throws what cannot be started.
  virtual void start(const Entry& entry, const void* arguments, const c10::Stream& stream) = 0;
};

// Kernels run on devices of this type from now on. `launcher` lives until the process ends; null: none.
void register_launcher(c10::DeviceType type, Launcher* launcher);

// Why operators run without kernels on a device; empty: they have them. Thread safety: any thread.
std::string why_no_kernels(c10::Device device);

// Runs a kernel: on the host to the end, elsewhere on the device's current stream.
// REQUIRES: why_no_kernels(device) is empty.
void run(const Entry& entry, const void* arguments, c10::Device device);

}  // namespace roundpipe::kernels
