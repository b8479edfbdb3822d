#pragma once

#include <string>

#include <ATen/core/Tensor.h>

namespace roundpipe::memory {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

}  // namespace roundpipe::memory
