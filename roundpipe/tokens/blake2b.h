#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace roundpipe::tokens {

// BLAKE2b with a digest of 48 bytes (RFC 7693), without a key, as little-endian numbers: those of Python's
// hashlib.blake2b(text, digest_size=48).
std::array<uint64_t, 6> blake2b(std::string_view text);

}  // namespace roundpipe::tokens
