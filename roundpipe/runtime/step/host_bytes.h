#pragma once

#include <cstdint>

namespace roundpipe::runtime {

// What a model and its fused optimizer take of the host.
struct HostBytes {
  int64_t parameters = 0;  // number of trained parameters
  int64_t weights_and_gradients = 0;
  int64_t remainders = 0;
  int64_t moments = 0;
};

}  // namespace roundpipe::runtime
