#include <roundpipe/device/accelerator/page_lock.h>

#include <dlfcn.h>

#include <optional>

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <c10/core/DeviceGuard.h>

namespace roundpipe::device {
namespace {

// Common to CUDA's and HIP's functions: 0 is success, and kPortable makes the pages pinned for every device.
using Register = int (*)(void*, size_t, unsigned int);
using Unregister = int (*)(void*);
using GetLastError = int (*)();
constexpr unsigned int kPortable = 1;

// Registering makes a context on the current device if it has none. Like torch's own allocator, choose a device that
// has a context: a worker on the second card must not cost memory on the first.
std::optional<c10::Device> device_in_use() {
  const auto type = at::accelerator::getAccelerator(false);
  if (!type) return {};
  const auto& hooks = at::globalContext().getAcceleratorHooksInterface(type);
  for (c10::DeviceIndex index = 0; index < at::accelerator::deviceCount(); ++index) {
    if (hooks.hasPrimaryContext(index)) return c10::Device(*type, index);
  }
  return {};
}

class RuntimePageLocker final : public PageLocker {
 public:
  RuntimePageLocker(Register lock, Unregister unlock, GetLastError last_error)
      : lock_(lock), unlock_(unlock), last_error_(last_error) {}

  bool lock(void* data, int64_t size_bytes) override {
    const c10::OptionalDeviceGuard guard(device_in_use());
    return succeeded(lock_(data, static_cast<size_t>(size_bytes), kPortable));
  }

  void unlock(void* data, int64_t /*size_bytes*/) noexcept override {
    // At the end of a process, the runtime may go before the last tensor; then its pages are unlocked already.
    succeeded(unlock_(data));
  }

 private:
  // Clears a failure: the runtime remembers it, and torch would report it after its next kernel.
  bool succeeded(int status) const {
    if (status != 0) last_error_();
    return status == 0;
  }

  const Register lock_;
  const Unregister unlock_;
  const GetLastError last_error_;
};

void* find_symbol(const std::string& name, const std::vector<std::string>& libraries) {
  if (void* const symbol = dlsym(RTLD_DEFAULT, name.c_str())) return symbol;
  for (const std::string& library : libraries) {
    // Never closed, so that the library and the functions stay loaded.
    void* const handle = dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
    if (handle == nullptr) continue;
    if (void* const symbol = dlsym(handle, name.c_str())) return symbol;
  }
  return nullptr;
}

PageLocker* make_runtime_page_locker() {
  const auto type = at::accelerator::getAccelerator(false);
  if (!type || (*type != c10::DeviceType::CUDA && *type != c10::DeviceType::HIP)) return nullptr;
  // torch built for ROCm calls its devices "cuda", too.
  auto locker = find_page_locker("cuda", {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"});
  if (!locker) locker = find_page_locker("hip", {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"});
  return locker.release();
}

}  // namespace

std::unique_ptr<PageLocker> find_page_locker(const std::string& prefix, const std::vector<std::string>& libraries) {
  void* const lock = find_symbol(prefix + "HostRegister", libraries);
  void* const unlock = find_symbol(prefix + "HostUnregister", libraries);
  void* const last_error = find_symbol(prefix + "GetLastError", libraries);
  if (lock == nullptr || unlock == nullptr || last_error == nullptr) return nullptr;
  return std::make_unique<RuntimePageLocker>(reinterpret_cast<Register>(lock), reinterpret_cast<Unregister>(unlock),
                                             reinterpret_cast<GetLastError>(last_error));
}

PageLocker* runtime_page_locker() {
  // Leaked on purpose: the last tensor may be freed after everything else.
  static PageLocker* const locker = make_runtime_page_locker();
  return locker;
}

}  // namespace roundpipe::device
