#pragma once

#include <functional>
#include <string>

#include <roundpipe/kernels/card/compiler.h>

namespace roundpipe::kernels::card {

// What starts kernels on cards of a vendor: functions of its driver, which CUDA and ROCm have with the same arguments,
// and return 0 or the number of an error. Thread safety: any thread.
struct Driver {
  using Module = void*;
  using Function = void*;

  std::string name;
  int (*load)(Module* module, const void* program);
  int (*find)(Function* function, Module module, const char* name);
  int (*launch)(Function function, unsigned blocks_x, unsigned blocks_y, unsigned blocks_z, unsigned threads_x,
                unsigned threads_y, unsigned threads_z, unsigned shared_bytes, void* stream, void** arguments,
                void** more);
  int (*error_text)(int error, const char** text);

  // Lets this thread use the device, which torch has made current.
  std::function<void(int device)> enter;
  // Of a device, as the compiler calls it.
  std::function<std::string(int device)> architecture;
  std::function<Compiler()> compiler;

  // Throws Error, with what was being done, if a function has returned an error.
  void check(int error, const std::string& what) const;
};

// Throw Error where a library or a function is missing.
Driver cuda_driver();
Driver rocm_driver();

}  // namespace roundpipe::kernels::card
