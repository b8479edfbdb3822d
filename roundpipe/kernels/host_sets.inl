#pragma once

#include <roundpipe/kernels/numbers.inl>

#include <roundpipe/kernels/teams.inl>

#include <roundpipe/kernels/cross_entropy.inl>
#include <roundpipe/kernels/encodings.inl>
#include <roundpipe/kernels/gates.inl>
#include <roundpipe/kernels/rms_norm.inl>
#include <roundpipe/kernels/rotary.inl>

namespace roundpipe::kernels {

// Run the items [begin, end) of a kernel of list.inl on the host, compiled for an instruction set. `shared` has room
// for lanes * kNumbers + floats() numbers. Any thread.
namespace baseline {
template <typename Kernel>
void run_items(const Kernel& kernel, Int64 begin, Int64 end, float* shared);
}
namespace avx2 {
template <typename Kernel>
void run_items(const Kernel& kernel, Int64 begin, Int64 end, float* shared);
}
namespace avx512 {
template <typename Kernel>
void run_items(const Kernel& kernel, Int64 begin, Int64 end, float* shared);
}

}  // namespace roundpipe::kernels
