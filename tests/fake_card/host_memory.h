#pragma once

#include <ATen/core/CachingHostAllocator.h>

namespace fake_card {

// Page-locked memory of the host, in powers of two. A card reads and writes it after the call that asked for it has
// returned; what is freed is written over, and handed out again when the streams that were recorded are past it.
// Thread safety: any thread.
at::HostAllocator* pinned_allocator();

// Whether the address lies in memory of that allocator.
bool is_pinned(const void* address);

}  // namespace fake_card
