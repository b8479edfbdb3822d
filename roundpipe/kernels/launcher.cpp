#include <roundpipe/kernels/launcher.h>

#include <array>
#include <atomic>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <roundpipe/core/error.h>

namespace roundpipe::kernels {
namespace {

using Launchers = std::array<std::atomic<Launcher*>, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

std::atomic<Launcher*>& launcher_of(c10::DeviceType type) {
  static Launchers launchers{};
  return launchers.at(static_cast<std::size_t>(type));
}

}  // namespace

Launcher::~Launcher() = default;

void register_launcher(c10::DeviceType type, Launcher* launcher) { launcher_of(type).store(launcher); }

std::string why_no_kernels(c10::Device device) {
  if (device.is_cpu() || device.is_meta()) return {};
  Launcher* const launcher = launcher_of(device.type()).load();
  if (launcher == nullptr) return concat("nothing starts kernels on devices of type ", device.type());
  const c10::DeviceGuard guard(device);
  return launcher->why_not(guard.current_device().index());
}

void run(const Entry& entry, const void* arguments, c10::Device device) {
  if (device.is_cpu()) return entry.run_on_host(arguments);
  const c10::DeviceGuard guard(device);
  const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(guard.current_device());
  launcher_of(device.type()).load()->start(entry, arguments, stream);
}

}  // namespace roundpipe::kernels
