#pragma once

#include <memory>
#include <string>
#include <vector>

#include <roundpipe/device/page_locker.h>

namespace roundpipe::device {

// Returns the page locker of the accelerator's runtime (CUDA, ROCm), or null on other accelerators and without one. The
// runtime is looked up at run time, so that nothing links against it. The locker lives until the process ends.
PageLocker* runtime_page_locker();

// Makes a locker from PREFIXHostRegister, PREFIXHostUnregister and PREFIXGetLastError. Looks for them among the global
// symbols first, then in those of `libraries` that are loaded; loads none. Returns null if a function is missing.
std::unique_ptr<PageLocker> find_page_locker(const std::string& prefix, const std::vector<std::string>& libraries);

}  // namespace roundpipe::device
