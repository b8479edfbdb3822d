#pragma once

#include <cstdint>

#include <roundpipe/memory/crossing.h>

// What of a tensor's address is kept wherever its values go.
inline uintptr_t place_of(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % static_cast<uintptr_t>(roundpipe::memory::kKept_bytes);
}
