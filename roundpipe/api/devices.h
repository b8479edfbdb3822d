#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

namespace roundpipe {

// The devices that all models of the process share. Any thread, except inside a layer or a loss.
// After a Model exists, replacing them is allowed at any time: calls that run keep their devices.

struct DeviceInfo {
  std::string name;                     // "cuda:0", "virtual:1"
  c10::Device torch_device{c10::kCPU};  // of the tensors that layers see there; the CPU for virtual devices
  int64_t used_bytes = 0;
  int64_t peak_bytes = 0;
  int64_t limit_bytes = 0;  // 0 = no known cap
  std::string failure;      // why it was taken out of the pool; empty: it is in use
};

// The current devices, in order. The first use makes them: as the environment variable ROUNDPIPE_DEVICES says or,
// without it, all accelerators, or one virtual device on a machine without any. Throws Error once the engine has ended.
std::vector<DeviceInfo> devices();

// Replaces the devices, for example by "cuda:0,cuda:1", or "virtual:4" for four devices on the host's cores. For the
// grammar see device::parse_devices. Throws std::invalid_argument for a text or a device that cannot be.
//
// `fp16_accumulation`: whether products of fp16 matrices on CUDA devices are added up in fp16, at twice the rate on
// GeForce cards, with fewer bits; unset: whether the environment variable ROUNDPIPE_FP16_ACCUMULATION is 1. This is
// torch's switch of the whole process, at::Context::setAllowFP16AccumulationCuBLAS. It turns when no device works,
// which is waited for, and back when the next pool is made or the engine ends. Calls made while the program has it
// otherwise throw std::invalid_argument. Devices without CUDA compute the same with it and without.
void set_devices(const std::string& devices, std::optional<bool> fp16_accumulation = std::nullopt);

// Brings devices back that have failed, and returns their names.
std::vector<std::string> restore_devices();

// Restarts the peaks of all devices from what is in use now.
void reset_peak_memory();

// Finishes all work that has been submitted, steps included, and ends the engine's threads for good. Later calls throw
// Error. Runs at process exit by itself; a program needs it only to end earlier.
void shut_down();

}  // namespace roundpipe
