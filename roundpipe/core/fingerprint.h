#pragma once

#include <cstddef>
#include <cstdint>

namespace roundpipe {

// A fingerprint of bytes, to tell whether they have changed. All bytes are read, about as fast as memory delivers them.
// A change within eight consecutive bytes (from a multiple of eight on) always changes the fingerprint; that another
// one does not has, for all that is known of such functions, a chance of one in 2^64. No defence against who looks for
// two contents with one fingerprint. Thread safety: any thread.
uint64_t fingerprint(const void* data, std::size_t bytes) noexcept;

// The fingerprint of a sequence, from those of its first parts and of the next one: changes if either does.
uint64_t join_fingerprints(uint64_t first, uint64_t next) noexcept;

// The output function of splitmix64 (Steele, Lea, Flood 2014): every input bit changes every output bit with a
// probability close to one half. What is drawn with it is the same on every machine.
constexpr uint64_t mixed(uint64_t value) {
  value += 0x9E3779B97F4A7C15U;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

}  // namespace roundpipe
