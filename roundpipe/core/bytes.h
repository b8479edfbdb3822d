#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace roundpipe {

// Every parameter of a flat block starts at a multiple of this offset, on the host and on the device.
inline constexpr int64_t kBlockAlignment_bytes = 256;

inline constexpr int64_t align_up(int64_t size_bytes, int64_t alignment_bytes) {
  return (size_bytes + alignment_bytes - 1) / alignment_bytes * alignment_bytes;
}

// "512B", "64KiB", "1.5 GiB", "8GB": KiB/MiB/GiB/TiB are powers of 1024, KB/MB/GB/TB of 1000. Only 0 needs no unit.
// Throws std::invalid_argument naming `where`.
int64_t parse_bytes(std::string_view text, std::string_view where);

// "8GB/s" or "8": GB/s with 1 GB = 1e9 bytes. Throws std::invalid_argument naming `where`.
double parse_gb_per_s(std::string_view text, std::string_view where);

// "0.8ms", "800us", or a plain number of milliseconds. Throws std::invalid_argument naming `where`.
double parse_ms(std::string_view text, std::string_view where);

// "30s", "2min", "0.8ms" or "800us": milliseconds, above 0. Throws std::invalid_argument naming `where`.
double parse_duration_ms(std::string_view text, std::string_view where);

// "1.50 GiB", for messages.
std::string format_bytes(int64_t size_bytes);

}  // namespace roundpipe
