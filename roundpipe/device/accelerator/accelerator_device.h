#pragma once

#include <cstdint>
#include <memory>

#include <roundpipe/device/device.h>

namespace roundpipe::device {

// Where a spec has no `memory=`, a worker may take its share of what is free on the card when it is made, less this
// part of the card (1 / kReservedPart): kernels are loaded later, and allocators lose a little between tensors.
constexpr int64_t kReservedPart = 32;

// A worker on one of torch's accelerators, through torch's device-generic interfaces only, so one source serves
// CUDA, ROCm, NPU and XPU. Each worker has streams of its own; `sharers` workers share the card and its allocator.
// A completion thread turns stream progress into events, so that no host thread blocks the device.
// Throws std::invalid_argument when torch does not see such a device.
std::unique_ptr<Device> make_accelerator_device(const DeviceSpec& spec, int sharers);

}  // namespace roundpipe::device
