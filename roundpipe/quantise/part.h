#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/ScalarType.h>

namespace roundpipe::quantise {

// One of the tensors that hold an encoded one.
struct Part {
  std::string suffix;  // of its name, behind that of the tensor: "_codes", "_scale"
  c10::ScalarType dtype;
  std::vector<int64_t> sizes;
};

}  // namespace roundpipe::quantise
