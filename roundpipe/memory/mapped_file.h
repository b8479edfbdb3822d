#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace roundpipe::memory {

// A whole file as uint8 [its size], mapped: bytes are read when somebody looks at them, and the system may drop them
// and read them again. Writes stay in this process, in memory that is taken page by page.
// Ownership: the mapping lives as long as a tensor in it.
// Whoever shortens or overwrites the file meanwhile changes what is seen here, or ends the process (SIGBUS); a file
// that is put in its place is another one, and does not matter.
// Throws std::invalid_argument when the file is empty or cannot be mapped.
at::Tensor map_file(const std::string& path);

// Whether a tensor lies in such a mapping.
bool is_mapped(const at::Tensor& tensor);

}  // namespace roundpipe::memory
