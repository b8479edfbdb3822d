#pragma once

#include <string>
#include <vector>

#include <roundpipe/optim/kernels/kernels.h>

namespace roundpipe::optim {

// The instruction sets that this build has kernels for and this processor can run, the best one last. All compute the
// same bits.
std::vector<std::string> instruction_sets();

// The instruction set in use: the last one set, else ROUNDPIPE_OPTIM_ISA, else the best. Throws std::invalid_argument
// if that variable names none.
std::string instruction_set();

// Makes updates that start from now on use `name`. Thread safety: any thread. Throws std::invalid_argument unless
// `name` is one of instruction_sets().
void set_instruction_set(const std::string& name);

// The kernels of instruction_set().
const kernels::Kernels& current_kernels();

}  // namespace roundpipe::optim
