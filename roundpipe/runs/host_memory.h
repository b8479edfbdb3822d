#pragma once

#include <cstdint>

namespace roundpipe {

// The memory that new allocations can have without swapping, as Linux estimates it. Any thread.
int64_t free_host_bytes();

}  // namespace roundpipe
