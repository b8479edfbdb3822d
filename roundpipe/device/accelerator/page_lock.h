#pragma once

#include <memory>
#include <string>
#include <vector>

#include <roundpipe/device/page_locker.h>

namespace roundpipe::device {

// The page locker of the runtime under torch's accelerator (CUDA, ROCm), found at run time, so that nothing links
// against it. Null where there is no such runtime: on other accelerators, and without one. Lives until the process
// ends.
PageLocker* runtime_page_locker();

// A locker made of PREFIXHostRegister, PREFIXHostUnregister and PREFIXGetLastError, looked for in what this process has
// loaded: first among global symbols, then in `libraries`, none of which it loads. Null when one is missing.
std::unique_ptr<PageLocker> find_page_locker(const std::string& prefix, const std::vector<std::string>& libraries);

}  // namespace roundpipe::device
