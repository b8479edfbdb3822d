#pragma once

#include <cstdint>

namespace roundpipe::device {

// Copies of this size or more go past the caches: what they write would not fit a core's share of them, and a store
// that first reads its line takes a third of the memory's bandwidth.
inline constexpr int64_t kStreamed_bytes = 4 << 20;

// memcpy, with stores that go past the caches where the processor has them and the copy is large.
// REQUIRES: no overlap.
void streaming_copy(void* dst, const void* src, int64_t size_bytes);

}  // namespace roundpipe::device
