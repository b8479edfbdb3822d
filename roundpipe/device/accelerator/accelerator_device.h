#pragma once

#include <cstdint>
#include <memory>

#include <roundpipe/device/device.h>

namespace roundpipe::device {

// Without `memory=` in its spec, a worker may use its share of the card's free memory at creation, after subtracting a
// reserve of 1 / kReservedPart of the card: kernels are loaded later, and allocators lose a little between tensors.
constexpr int64_t kReservedPart = 32;

// Makes a worker's device on one of torch's accelerators. Uses only torch's device-generic interfaces, so that one
// source serves CUDA, ROCm, NPU and XPU. Each worker has its own streams; `sharers` workers share the card and its
// allocator. Completion threads turn stream progress into events, so that no host thread blocks the device.
// Throws std::invalid_argument if torch does not see the device.
std::unique_ptr<Device> make_accelerator_device(const DeviceSpec& spec, int sharers);

}  // namespace roundpipe::device
