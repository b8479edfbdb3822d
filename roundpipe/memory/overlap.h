#pragma once

#include <vector>

#include <roundpipe/memory/named_tensor.h>

namespace roundpipe::memory {

// Throws std::invalid_argument if two parameters have elements in the same memory and one of them is trained: in
// PyTorch, a step of one changes the other, which memory of their own would not show. One parameter that is named
// several times overlaps with nothing.
void refuse_overlap(const std::vector<NamedTensor>& parameters);

}  // namespace roundpipe::memory
