#pragma once

#include <string>
#include <vector>

#include <roundpipe/optim/kernels/kernels.h>

namespace roundpipe::optim {

// The instruction sets that this build has kernels for and this processor can run, the best one last. All give the
// same bits.
std::vector<std::string> instruction_sets();

// The one in use: ROUNDPIPE_OPTIM_ISA, else the best. Throws std::invalid_argument if that variable names none.
std::string instruction_set();

// Updates that begin from now on use `name`; any thread may call it. Throws std::invalid_argument unless it is one of
// instruction_sets().
void set_instruction_set(const std::string& name);

// The kernels of instruction_set().
const kernels::Kernels& current_kernels();

}  // namespace roundpipe::optim
