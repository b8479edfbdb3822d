#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace roundpipe::memory {

// Maps a whole file as uint8 [its size]. The system reads bytes when they are accessed, and may drop them and read them
// again. Writes stay in this process; each written page takes memory.
// Ownership: the mapping lives as long as a tensor in it.
// Overwriting the file meanwhile changes the values, and shortening it can end the process (SIGBUS). Replacing it by
// another file is harmless.
// Throws std::invalid_argument if the file is empty or cannot be mapped.
at::Tensor map_file(const std::string& path);

// Whether a tensor lies in such a mapping.
bool is_mapped(const at::Tensor& tensor);

}  // namespace roundpipe::memory
