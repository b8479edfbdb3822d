#include <roundpipe/runs/random_states.h>

#include <exception>
#include <mutex>
#include <optional>
#include <string>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>

#include <roundpipe/core/error.h>

namespace roundpipe {

namespace {

at::Tensor state_of_default(c10::Device device) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  return generator.get_state();
}

void set_state_of_default(c10::Device device, const at::Tensor& state) {
  at::Generator generator = at::globalContext().defaultGenerator(device);
  const std::lock_guard lock(generator.mutex());
  generator.set_state(state);
}

int count_of(std::optional<c10::DeviceType> accelerator) {
  return accelerator ? static_cast<int>(at::accelerator::deviceCount()) : 0;
}

}  // namespace

StateValue random_states(StateValue::Dict others) {
  StateValue::Dict states{{"torch", state_of_default(c10::kCPU)}};
  for (auto& entry : others) states.push_back(std::move(entry));
  const std::optional<c10::DeviceType> accelerator = at::accelerator::getAccelerator(false);
  if (const int count = count_of(accelerator); count > 0) {
    StateValue::List of_devices;
    for (int i = 0; i < count; ++i)
      of_devices.emplace_back(state_of_default({*accelerator, static_cast<c10::DeviceIndex>(i)}));
    states.emplace_back("devices", std::move(of_devices));
  }
  return states;
}

void check_random_states(const StateValue& states) {
  try {
    at::detail::createCPUGenerator().set_state(states.at("torch").as_tensor());
    const StateValue* const of_devices = states.find("devices");
    for (const StateValue& state : of_devices == nullptr ? StateValue::List() : of_devices->items()) {
      if (state.as_tensor().scalar_type() != at::kByte) throw Error("random.devices has something else");
    }
  } catch (const std::exception& wrong) {  // c10::Error has more than a line
    const std::string text = wrong.what();
    throw Error(concat("[load_checkpoint] random: no state of a generator: ", text.substr(0, text.find('\n'))));
  }
}

void restore_random_states(const StateValue& states) {
  set_state_of_default(c10::kCPU, states.at("torch").as_tensor());
  const StateValue* const of_devices = states.find("devices");
  const std::optional<c10::DeviceType> accelerator = at::accelerator::getAccelerator(false);
  if (of_devices == nullptr) return;
  for (int i = 0; i < count_of(accelerator) && static_cast<size_t>(i) < of_devices->items().size(); ++i) {
    set_state_of_default({*accelerator, static_cast<c10::DeviceIndex>(i)},
                         of_devices->items()[static_cast<size_t>(i)].as_tensor());
  }
}

}  // namespace roundpipe
