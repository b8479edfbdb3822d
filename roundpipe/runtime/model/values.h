#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::runtime {

// The values between layers: the tensors, and the structure that a kind of layer needs to reassemble them (a pytree for
// Python layers). The engine moves the tensors and passes the structure on unchanged.
struct Values {
  std::vector<at::Tensor> tensors;
  std::shared_ptr<const void> structure;
};

}  // namespace roundpipe::runtime

namespace roundpipe {

// A loss over the engine's values: outputs and label of one microbatch in, scalars out. Called on devices' threads.
using LossFunction =
    std::function<std::vector<at::Tensor>(const runtime::Values& outputs, const runtime::Values& label)>;

}  // namespace roundpipe
