#pragma once

#include <ATen/core/Tensor.h>

#include <roundpipe/optim/algorithm.h>
#include <roundpipe/optim/kernels/kernels.h>

namespace roundpipe::optim {

class ThreadPool;

// Makes one step of Adafactor. All tensors in `memory` are contiguous, of `sizes`. memory.states holds row_var and
// col_var, the means of squares over the last and the second-to-last dimension; with fewer than two dimensions, it
// holds variance, one number per element.
void adafactor_step(const Hyperparameters& hyper, Scalars& scalars, const kernels::Memory& memory,
                    at::IntArrayRef sizes, ThreadPool& pool);

}  // namespace roundpipe::optim
