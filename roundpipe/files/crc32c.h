#pragma once

#include <cstddef>
#include <cstdint>

namespace roundpipe::files {

// CRC-32C (Castagnoli), the checksum of every file and record of a checkpoint. `seed`: the checksum of the bytes before
// these, 0 where there are none, so that crc32c(b, n, crc32c(a, m)) is the checksum of a followed by b.
// Uses the processor's instructions for it where it has them.
// Thread safety: any thread.
uint32_t crc32c(const void* data, std::size_t bytes, uint32_t seed = 0) noexcept;

// The same by tables, for any processor.
uint32_t crc32c_by_tables(const void* data, std::size_t bytes, uint32_t seed = 0) noexcept;

// The checksum of two pieces of a file, one behind the other, from the checksums of each (with seed 0).
uint32_t crc32c_combine(uint32_t first, uint32_t second, uint64_t second_bytes) noexcept;

}  // namespace roundpipe::files
