#include <roundpipe/kernels/card/driver.h>

#include <vector>

#include <roundpipe/core/error.h>
#include <roundpipe/kernels/card/find_library.h>

namespace roundpipe::kernels::card {
namespace {

void* library_or_error(const std::string& name) {
  void* const library = find_library(name);
  if (library == nullptr) throw Error(concat("[kernels] ", name, " was not found; install the card's driver"));
  return library;
}

// What both drivers have, under these names.
struct Names {
  const char *driver, *load, *find, *launch, *error_text;
};

Driver driver_of(void* library, const Names& names) {
  Driver driver;
  driver.name = names.driver;
  find_function(driver.load, library, names.load);
  find_function(driver.find, library, names.find);
  find_function(driver.launch, library, names.launch);
  find_function(driver.error_text, library, names.error_text);
  return driver;
}

}  // namespace

void Driver::check(int error, const std::string& what) const {
  if (error == 0) return;
  const char* text = nullptr;
  error_text(error, &text);
  throw Error(
      concat("[kernels] ", name, " failed ", what, ": ", text == nullptr ? "unknown error" : text, " (", error, ")"));
}

Driver cuda_driver() {
  // Of CUdevice_attribute.
  constexpr int kMajor = 75, kMinor = 76;
  void* const library = library_or_error("libcuda.so");
  Driver driver =
      driver_of(library, {"CUDA", "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernel", "cuGetErrorString"});
  int (*get_context)(void**), (*set_context)(void*), (*get_device)(int*, int), (*retain)(void**, int);
  int (*get_attribute)(int*, int, int), (*get_version)(int*);
  find_function(get_context, library, "cuCtxGetCurrent");
  find_function(set_context, library, "cuCtxSetCurrent");
  find_function(get_device, library, "cuDeviceGet");
  find_function(retain, library, "cuDevicePrimaryCtxRetain");
  find_function(get_attribute, library, "cuDeviceGetAttribute");
  find_function(get_version, library, "cuDriverGetVersion");
  int version = 0;
  driver.check(get_version(&version), "to tell its version");

  // torch's guard leaves a new thread as it is if the device is number 0: the runtime would bind it later.
  driver.enter = [driver, get_context, set_context, get_device, retain](int device) {
    void* context = nullptr;
    driver.check(get_context(&context), "to tell a thread's context");
    if (context != nullptr) return;
    int handle = 0;
    driver.check(get_device(&handle, device), "to find a device");
    driver.check(retain(&context, handle), "to make a device's context");  // kept until the process ends, as torch does
    driver.check(set_context(context), "to enter a device's context");
  };
  driver.architecture = [driver, get_device, get_attribute](int device) {
    int handle = 0, major = 0, minor = 0;
    driver.check(get_device(&handle, device), "to find a device");
    driver.check(get_attribute(&major, kMajor, handle), "to tell a device's architecture");
    driver.check(get_attribute(&minor, kMinor, handle), "to tell a device's architecture");
    return concat("sm_", major, minor);
  };
  driver.compiler = [version] { return Compiler::nvrtc(version / 1000); };
  return driver;
}

Driver rocm_driver() {
  void* const library = library_or_error("libamdhip64.so");
  Driver driver = driver_of(
      library, {"ROCm", "hipModuleLoadData", "hipModuleGetFunction", "hipModuleLaunchKernel", "hipDrvGetErrorString"});
  int (*get_properties)(char*, int);
  find_function(get_properties, library, "hipGetDevicePropertiesR0600");

  driver.enter = [](int /*device*/) {};  // devices are current, and have no contexts
  driver.architecture = [driver, get_properties](int device) {
    // The struct's fields differ between versions; the last one that begins so is gcnArchName,
    // "gfx90a:sramecc+:xnack-".
    std::vector<char> properties(1 << 14, '\0');
    driver.check(get_properties(properties.data(), device), "to tell a device's properties");
    const std::string_view all(properties.data(), properties.size());
    const std::size_t at = all.rfind("gfx");
    if (at == std::string_view::npos) throw Error("[kernels] ROCm does not tell a device's architecture");
    return std::string(all.data() + at);
  };
  driver.compiler = [] { return Compiler::hiprtc(); };
  return driver;
}

}  // namespace roundpipe::kernels::card
