#pragma once

#include <cstdint>

namespace roundpipe::memory {

// The memory that new allocations can have without swapping, as Linux estimates it. Any thread.
int64_t free_host_bytes();

// The memory that this process has; 0 where the system does not say. Any thread.
int64_t resident_bytes();

// The most that the values of steps may take on the host: what is free and what they have already, less a twentieth for
// everything else. Any thread.
int64_t room_for_values();

}  // namespace roundpipe::memory
