#pragma once

#include <string>
#include <vector>

namespace roundpipe {

// The instruction sets of processors for which this build has kernels of its own. All compute the same bits.
enum class InstructionSet : int { kBaseline, kAvx2, kAvx512, kNeon };

// The names of those that this processor can run, the best one last.
std::vector<std::string> instruction_sets();

// The instruction set in use: the last one set, else ROUNDPIPE_OPTIM_ISA, else the best. Throws std::invalid_argument
// if that variable names none.
InstructionSet current_instruction_set();
std::string instruction_set();

// Makes work that starts from now on use `name`. Thread safety: any thread. Throws std::invalid_argument unless `name`
// is one of instruction_sets().
void set_instruction_set(const std::string& name);

}  // namespace roundpipe
