#pragma once

#include <string>

#include <roundpipe/kernels/card/compiler.h>
#include <roundpipe/kernels/card/program_cache.h>

namespace roundpipe::kernels::card {

// The program with all kernels for an architecture: from the cache, else compiled, which takes seconds, and kept there.
// Throws Error where it cannot be compiled. Thread safety: any thread.
std::string program_for(const Compiler& compiler, const std::string& architecture, const ProgramCache& cache);

}  // namespace roundpipe::kernels::card
