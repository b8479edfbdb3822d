#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include <roundpipe/optim/algorithm.h>
#include <roundpipe/optim/kernels/kernels.h>

namespace roundpipe::optim {

// The dtype of the part of an fp32 master that weights of such a dtype lack: of bf16, whose master's upper half the
// weight is, int16, or int8 for masters of 24 bits; float32 for fp16. None for other dtypes.
std::optional<c10::ScalarType> remainder_dtype(c10::ScalarType weights, MasterFormat format);

// Whether trained weights of such a dtype can have such masters.
bool has_masters(c10::ScalarType weights, MasterFormat format);
// Throws std::invalid_argument, which names the parameter, for trained weights that cannot have such masters.
void check_masters(MasterFormat format, c10::ScalarType weights, const std::string& name);

// Writes to `to` what `from` says of masters of the same bf16 weights. Of both, each may be int16 or int8, of equal
// sizes. From int16 to int8 it is the nearest with which the weight stays as it is.
void convert_remainder(const at::Tensor& from, const at::Tensor& to);

// What rounding to 24 bits depends on, beside the place of an element in its parameter: a number for the parameter, and
// the steps that it has had. So bits depend on no thread, device or node, and a run that goes on has those of one that
// was not interrupted.
kernels::RandomKey random_key(uint64_t parameter, double step);

}  // namespace roundpipe::optim
