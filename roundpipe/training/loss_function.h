#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/runtime/model/values.h>

namespace roundpipe {

// A loss over the engine's values: outputs and label of one microbatch in, scalars out. Called on devices' threads.
using LossFunction =
    std::function<std::vector<at::Tensor>(const runtime::Values& outputs, const runtime::Values& label)>;

}  // namespace roundpipe
