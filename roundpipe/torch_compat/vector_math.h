#pragma once

namespace roundpipe::torch_compat {

// Lets the vector math library of torch's CPU kernels (cos, exp, log and so on) choose its kernels now, on this thread.
//
// If the first such call of a process runs on several threads at once, some of them may compute with a kernel of lower
// accuracy: differences up to 1.5e-4, in one run of ten (MKL on a processor with AMX). A first call on one thread
// prevents that.
// Thread safety: any thread; returns after the choice was made, by whichever thread.
void settle_vector_math();

}  // namespace roundpipe::torch_compat
