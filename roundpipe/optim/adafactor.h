#pragma once

#include <ATen/core/Tensor.h>

#include <roundpipe/optim/algorithm.h>
#include <roundpipe/optim/kernels/kernels.h>

namespace roundpipe::optim {

class ThreadPool;

// One step of Adafactor. The numbers are contiguous, of `sizes`. memory.states: row_var and col_var, means of squares
// over the last and the last but one dimension; with fewer than two dimensions variance, one for each element.
void adafactor_step(const Hyperparameters& hyper, Scalars& scalars, const kernels::Memory& memory,
                    at::IntArrayRef sizes, ThreadPool& pool);

}  // namespace roundpipe::optim
