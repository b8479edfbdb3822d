#include <roundpipe/kernels/card/compiler.h>

#include <roundpipe/core/error.h>
#include <roundpipe/kernels/card/find_library.h>

namespace roundpipe::kernels::card {
namespace {

void* library_or_error(const std::string& name, int newest_major, const std::string& advice) {
  void* const library = find_library(name, newest_major);
  if (library == nullptr) throw Error(concat("[kernels] ", name, " was not found; ", advice));
  return library;
}

}  // namespace

Compiler::Compiler(void* library, const std::string& prefix, const std::string& of_code, std::string name)
    : name_(std::move(name)) {
  find_function(create_, library, prefix + "CreateProgram");
  find_function(compile_, library, prefix + "CompileProgram");
  find_function(get_log_size_, library, prefix + "GetProgramLogSize");
  find_function(get_log_, library, prefix + "GetProgramLog");
  find_function(get_code_size_, library, prefix + "Get" + of_code + "Size");
  find_function(get_code_, library, prefix + "Get" + of_code);
  find_function(destroy_, library, prefix + "DestroyProgram");
  find_function(error_text_, library, prefix + "GetErrorString");
  int (*version)(int*, int*) = nullptr;
  find_function(version, library, prefix + "Version");
  int major = 0, minor = 0;
  version(&major, &minor);
  name_ += concat(" ", major, ".", minor);
}

Compiler Compiler::nvrtc(int newest_major) {
  void* const library =
      library_or_error("libnvrtc.so", newest_major, "install the package nvidia-cuda-nvrtc of the driver's version");
  Compiler compiler(library, "nvrtc", "CUBIN", "NVRTC");
  compiler.options_ = {"--std=c++17", "--fmad=false", "--define-macro=ROUNDPIPE_ON_CARD"};
  compiler.architecture_option_ = "--gpu-architecture=";
  return compiler;
}

Compiler Compiler::hiprtc() {
  Compiler compiler(library_or_error("libhiprtc.so", std::numeric_limits<int>::max(), "it is part of ROCm"), "hiprtc",
                    "Code", "hipRTC");
  compiler.options_ = {"-std=c++17", "-O3", "-ffp-contract=off", "-DROUNDPIPE_ON_CARD"};
  compiler.architecture_option_ = "--offload-arch=";
  return compiler;
}

std::vector<std::string> Compiler::options_for(const std::string& architecture) const {
  std::vector<std::string> options = options_;
  options.push_back(architecture_option_ + architecture);
  return options;
}

std::string Compiler::compile(const std::string& source, const std::vector<std::string>& options) const {
  std::vector<const char*> given;
  for (const std::string& option : options) given.push_back(option.c_str());
  Program program = nullptr;
  int status = create_(&program, source.c_str(), "roundpipe_kernels", 0, nullptr, nullptr);
  if (status == 0) status = compile_(program, static_cast<int>(given.size()), given.data());
  std::string code, log;
  std::size_t bytes = 0;
  if (status == 0) status = get_code_size_(program, &bytes);
  if (status == 0) {
    code.resize(bytes);
    status = get_code_(program, code.data());
  }
  if (status != 0 && program != nullptr && get_log_size_(program, &bytes) == 0) {
    log.resize(bytes);
    get_log_(program, log.data());
  }
  if (program != nullptr) destroy_(&program);
  if (status == 0) return code;
  throw Error(concat("[kernels] ", name_, " with ", options.back(), ": ", error_text_(status), "\n", log.c_str()));
}

}  // namespace roundpipe::kernels::card
