#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include <roundpipe/optim/algorithm.h>
#include <roundpipe/optim/kernels/kernels.h>

namespace roundpipe::optim {

class ThreadPool;

// Whether a group's parameters are stepped by Muon, and not by the AdamW beside it.
bool steps_by_muon(Algorithm algorithm, const Hyperparameters& hyper);

// Throws std::invalid_argument, which names the parameter, for sizes that a rule cannot step. Muon steps matrices, and
// tensors of three dimensions as stacks of matrices, such as the experts of a layer.
void check_sizes(Algorithm algorithm, const Hyperparameters& hyper, at::IntArrayRef sizes, const std::string& name);

// Makes one step of Muon, with torch.optim.Muon's operations, for each matrix of a stack alone. All tensors in `memory`
// are dense, of the sizes and strides of `like`; memory.states holds momentum_buffer. The products are torch's own, in
// bf16, on the calling thread and torch's threads, so their bits are torch's.
// Takes memory for the time of the step: about 10 bytes for each element of the largest matrix, and 2 for each element
// of a stack.
void muon_step(const Hyperparameters& hyper, Scalars& scalars, const kernels::Memory& memory, const at::Tensor& like,
               ThreadPool& pool);

}  // namespace roundpipe::optim
