#pragma once

#include <memory>
#include <vector>

#include <roundpipe/device/device.h>

namespace roundpipe::device {

// Makes the devices of `specs`. Throws std::invalid_argument if torch does not see an accelerator.
std::vector<std::unique_ptr<Device>> make_devices(const std::vector<DeviceSpec>& specs);

// All accelerators that torch sees or, if there are none, one virtual device per core of the host.
std::vector<DeviceSpec> default_devices();

}  // namespace roundpipe::device
