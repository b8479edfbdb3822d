#pragma once

#include <cstddef>
#include <limits>
#include <string>
#include <vector>

namespace roundpipe::kernels::card {

// A vendor's compiler of kernels at run time: NVRTC, or hipRTC, whose functions have the same arguments.
// Thread safety: any thread.
class Compiler {
 public:
  // Finds the library. `newest_major`: of what the driver can load. Throws Error where there is none.
  static Compiler nvrtc(int newest_major = std::numeric_limits<int>::max());
  static Compiler hiprtc();

  // Name and version.
  const std::string& name() const { return name_; }

  // What a program for this architecture ("sm_90", "gfx90a") is compiled with, so that it has the host's bits.
  std::vector<std::string> options_for(const std::string& architecture) const;

  // A program that the driver loads. Takes seconds. Throws Error with what the compiler says.
  std::string compile(const std::string& source, const std::vector<std::string>& options) const;

 private:
  using Program = void*;

  Compiler(void* library, const std::string& prefix, const std::string& of_code, std::string name);

  int (*create_)(Program*, const char* source, const char* name, int headers, const char* const*, const char* const*);
  int (*compile_)(Program, int count, const char* const* options);
  int (*get_log_size_)(Program, std::size_t*);
  int (*get_log_)(Program, char*);
  int (*get_code_size_)(Program, std::size_t*);
  int (*get_code_)(Program, char*);
  int (*destroy_)(Program*);
  const char* (*error_text_)(int);
  std::string name_;
  std::vector<std::string> options_;  // for every architecture
  std::string architecture_option_;
};

}  // namespace roundpipe::kernels::card
