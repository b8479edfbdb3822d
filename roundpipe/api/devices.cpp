#include <roundpipe/api/devices.h>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/device/device_spec.h>
#include <roundpipe/runtime/engine.h>

namespace roundpipe {

using runtime::Engine;

std::vector<DeviceInfo> devices() {
  const std::shared_ptr<Engine> engine = Engine::current();
  std::vector<DeviceInfo> infos;
  for (int i = 0; i < engine->pool_size(); ++i) {
    device::Device& device = engine->pool_worker(i).device();
    const device::MemoryStats memory = device.memory();
    DeviceInfo info;
    info.name = device.name();
    info.torch_device = device.torch_device();
    info.used_bytes = memory.current_bytes;
    info.peak_bytes = memory.peak_bytes;
    info.limit_bytes = memory.limit_bytes;
    infos.push_back(std::move(info));
  }
  for (const Engine::Failed& failed : engine->failed()) infos[static_cast<size_t>(failed.index)].failure = failed.error;
  return infos;
}

void set_devices(const std::string& devices, std::optional<bool> fp16_accumulation) {
  Engine::set_current(device::parse_devices(devices), fp16_accumulation);
}

std::vector<std::string> restore_devices() { return Engine::current()->restore(); }

void reset_peak_memory() {
  const std::shared_ptr<Engine> engine = Engine::current();
  for (int i = 0; i < engine->pool_size(); ++i) engine->pool_worker(i).device().reset_peak_memory();
}

void shut_down() {
  require_callers_thread();
  Engine::shut_down();
}

}  // namespace roundpipe
