#pragma once

#include <cstdint>

namespace roundpipe::device {

// Copies of at least this size bypass the caches: the written data would not fit a core's share of them, and a normal
// store reads its line first, which takes a third of the memory bandwidth.
inline constexpr int64_t kStreamed_bytes = 4 << 20;

// Works like memcpy, but large copies use stores that bypass the caches if the processor has them.
// REQUIRES: no overlap.
void streaming_copy(void* dst, const void* src, int64_t size_bytes);

}  // namespace roundpipe::device
