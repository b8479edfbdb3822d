#pragma once

#include <cstdint>

namespace roundpipe {

// The output function of splitmix64 (Steele, Lea, Flood 2014): every input bit changes every output bit with a
// probability close to one half. What is drawn with it is the same on every machine.
constexpr uint64_t mixed(uint64_t value) {
  value += 0x9E3779B97F4A7C15U;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9U;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EBU;
  return value ^ (value >> 31);
}

}  // namespace roundpipe
