#include <roundpipe/torch_compat/own_generators.h>

#include <algorithm>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

namespace roundpipe::torch_compat {
namespace {

// Every operator call passes this key just before the device's kernel. It is below Python's modes, which would disable
// a key above them, and tensors without data, as tracers use them, do not reach it.
constexpr c10::DispatchKey kKey = c10::DispatchKey::BackendSelect;

// Passed on to autograd's threads with the rest of a thread's state. torch itself never sets this kind.
c10::DebugInfoKind kind() { return c10::DebugInfoKind::PRODUCER_INFO; }

// Adds the index to a device; null for devices without random numbers, such as meta.
std::optional<c10::Device> with_generator(c10::Device device) {
  if (device.is_cpu()) return c10::Device(c10::kCPU);
  const auto accelerator = at::accelerator::getAccelerator(false);
  if (!accelerator || *accelerator != device.type()) return {};
  return device.has_index() ? device : c10::impl::VirtualGuardImpl(device.type()).getDevice();
}

bool is_tensor(const c10::Argument& argument) { return argument.type()->kind() == c10::TypeKind::TensorType; }

bool is_generator(const c10::Argument& argument) {
  const c10::TypePtr& type = argument.type();
  if (type->kind() == c10::TypeKind::GeneratorType) return true;
  return type->kind() == c10::TypeKind::OptionalType &&
         type->castRaw<c10::OptionalType>()->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

c10::Device device_of(at::ArrayRef<c10::IValue> values) {
  for (const c10::IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined()) return value.toTensor().device();
  }
  return c10::kCPU;
}

void draw_from_own(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  OwnGenerators* const own = OwnGenerators::current();
  if (own != nullptr) {
    const std::vector<c10::Argument>& arguments = op.schema().arguments();
    const size_t first = stack->size() - arguments.size();
    for (size_t i = 0; i < arguments.size(); ++i) {
      if (!is_generator(arguments[i])) continue;
      c10::IValue& given = (*stack)[first + i];
      std::optional<c10::Device> device;
      if (given.isNone()) {
        device = with_generator(device_of(torch::jit::last(*stack, arguments.size())));
      } else {
        const at::Generator generator = given.toGenerator();
        device = with_generator(generator.device());
        if (device && generator != at::globalContext().defaultGenerator(*device)) device.reset();
      }
      if (!device) continue;
      if (const at::Generator mine = own->of(*device); mine.defined()) given = mine;
    }
  }
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey), stack);
}

// Puts draw_from_own before every operator of torch that has a tensor and a generator argument. Operators without a
// tensor (rand, ...) call one of these.
struct Registration {
  Registration() {
    for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op || name.name.rfind("aten::", 0) != 0 || op->hasKernelForDispatchKey(kKey)) continue;
      const std::vector<c10::Argument>& arguments = op->schema().arguments();
      if (std::none_of(arguments.begin(), arguments.end(), is_generator)) continue;
      if (std::none_of(arguments.begin(), arguments.end(), is_tensor)) continue;
      const std::string plain = name.name.substr(name.name.find("::") + 2);
      aten.impl((name.overload_name.empty() ? plain : plain + "." + name.overload_name).c_str(),
                torch::CppFunction::makeFromBoxedFunction<&draw_from_own>());
    }
  }
  torch::Library aten{torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__};
};

// Registered before our first thread, because no operator may run meanwhile. Never undone: threads may outlive main().
[[gnu::used]] Registration* const registration = new Registration;

}  // namespace

void OwnGenerators::seed(uint64_t seed) {
  const MutexLock lock(mutex_);
  seed_ = seed;
  for (at::Generator& generator : generators_) {
    const std::lock_guard own_lock(generator.mutex());
    generator.set_current_seed(seed);
  }
  if (!shared_.defined()) return;
  const std::lock_guard shared_lock(shared_.mutex());
  shared_.set_current_seed(seed);
}

at::Generator OwnGenerators::of(c10::Device device) {
  if (device.is_cpu()) device = c10::Device(c10::kCPU);  // "cpu:0" has the same one
  const MutexLock lock(mutex_);
  if (shared_.defined() && !device.is_cpu()) return {};
  for (const at::Generator& generator : generators_) {
    if (generator.device() == device) return generator;
  }
  at::Generator generator;
  if (device.is_cpu()) {
    generator = at::detail::createCPUGenerator(seed_);
  } else {
    at::Generator standard = at::globalContext().defaultGenerator(device);
    const std::lock_guard standard_lock(standard.mutex());
    generator = standard.clone();
    generator.set_current_seed(seed_);
  }
  generators_.push_back(generator);
  return generator;
}

bool OwnGenerators::any() const {
  const MutexLock lock(mutex_);
  return !generators_.empty();
}

OwnGenerators* OwnGenerators::current() { return dynamic_cast<OwnGenerators*>(c10::ThreadLocalDebugInfo::get(kind())); }

at::Generator OwnGenerators::drawn_from(c10::Device device) {
  OwnGenerators* const own = current();
  const at::Generator mine = own != nullptr ? own->of(device) : at::Generator();
  return mine.defined() ? mine : at::globalContext().defaultGenerator(device);
}

OwnGenerators::Scope::Scope(std::shared_ptr<OwnGenerators> generators) : info_(kind(), std::move(generators)) {}

OwnGenerators::Shared::Shared(OwnGenerators& generators, const at::Generator& standard) : generators_(generators) {
  const MutexLock lock(generators_.mutex_);
  generators_.shared_ = standard;
}

OwnGenerators::Shared::~Shared() {
  const MutexLock lock(generators_.mutex_);
  generators_.shared_ = {};
}

}  // namespace roundpipe::torch_compat
