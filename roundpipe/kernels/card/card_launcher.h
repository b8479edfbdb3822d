#pragma once

#include <roundpipe/kernels/launcher.h>

namespace roundpipe::kernels::card {

// Starts kernels on torch's devices of type "cuda", which are NVIDIA's or AMD's. Links no library of theirs: what the
// driver and its compiler offer is found when the first kernel is asked for. Lives until the process ends.
Launcher* card_launcher();

}  // namespace roundpipe::kernels::card
