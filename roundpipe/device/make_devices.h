#pragma once

#include <memory>
#include <vector>

#include <roundpipe/device/device.h>

namespace roundpipe::device {

// Makes the devices of `specs`. Throws std::invalid_argument when an accelerator is not there.
std::vector<std::unique_ptr<Device>> make_devices(const std::vector<DeviceSpec>& specs);

// All accelerators that torch sees, else as many virtual devices as the host has cores.
std::vector<DeviceSpec> default_devices();

}  // namespace roundpipe::device
