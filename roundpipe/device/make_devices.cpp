#include <roundpipe/device/make_devices.h>

#include <algorithm>
#include <map>
#include <thread>

#include <ATen/DeviceAccelerator.h>

#include <roundpipe/core/error.h>
#include <roundpipe/device/accelerator/accelerator_device.h>
#include <roundpipe/device/virtual/virtual_device.h>

namespace roundpipe::device {

std::vector<std::unique_ptr<Device>> make_devices(const std::vector<DeviceSpec>& specs) {
  std::vector<std::unique_ptr<Device>> devices;
  std::shared_ptr<LinkThrottle> host;
  if (!specs.empty() && specs.front().host_gb_per_s > 0) {
    host = std::make_shared<LinkThrottle>(specs.front().host_gb_per_s);
  }
  std::map<int, int> sharers;
  for (const DeviceSpec& spec : specs) ++sharers[spec.index];
  for (const DeviceSpec& spec : specs) {
    if (spec.is_virtual) {
      devices.push_back(make_virtual_device(spec, host));
    } else {
      devices.push_back(make_accelerator_device(spec, sharers[spec.index]));
    }
  }
  return devices;
}

std::vector<DeviceSpec> default_devices() {
  std::vector<DeviceSpec> specs;
  const auto type = at::accelerator::getAccelerator(false);
  const int accelerators = type ? static_cast<int>(at::accelerator::deviceCount()) : 0;
  for (int index = 0; index < accelerators; ++index) {
    DeviceSpec spec;
    spec.is_virtual = false;
    spec.type = c10::DeviceTypeName(*type, /*lower_case=*/true);
    spec.index = index;
    specs.push_back(spec);
  }
  if (!specs.empty()) return specs;
  return parse_devices(concat("virtual:", std::max(1U, std::thread::hardware_concurrency())));
}

}  // namespace roundpipe::device
