#include <roundpipe/optim/dispatch.h>

namespace roundpipe::optim {

const kernels::Kernels& current_kernels() {
  switch (current_instruction_set()) {
#ifdef __x86_64__
    case InstructionSet::kAvx2:
      return kernels::avx2::table;
    case InstructionSet::kAvx512:
      return kernels::avx512::table;
#elif defined(__aarch64__)
    case InstructionSet::kNeon:
      return kernels::neon::table;
#endif
    default:
      return kernels::baseline::table;
  }
}

}  // namespace roundpipe::optim
