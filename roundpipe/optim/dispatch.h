#pragma once

#include <roundpipe/core/instruction_set.h>
#include <roundpipe/optim/kernels/kernels.h>

namespace roundpipe::optim {

using roundpipe::instruction_set;
using roundpipe::instruction_sets;
using roundpipe::set_instruction_set;

// The kernels of the instruction set in use.
const kernels::Kernels& current_kernels();

}  // namespace roundpipe::optim
