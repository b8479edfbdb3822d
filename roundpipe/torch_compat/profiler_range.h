#pragma once

#include <concepts>
#include <string>
#include <utility>

#include <ATen/record_function.h>

namespace roundpipe::torch_compat {

// A named range in the traces of torch.profiler and, under torch.autograd.profiler.emit_nvtx, an NVTX range. It lasts
// as long as the object. Costs some nanoseconds while nothing records: the name is not made then.
// Must not be moved. Ends on the thread that made it, innermost first.
class ProfilerRange {
 public:
  template <std::invocable Name>
  explicit ProfilerRange(Name&& name) : record_(at::RecordScope::USER_SCOPE) {
    if (record_.isActive()) record_.before(std::string(std::forward<Name>(name)()));
  }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

 private:
  at::RecordFunction record_;
};

}  // namespace roundpipe::torch_compat
