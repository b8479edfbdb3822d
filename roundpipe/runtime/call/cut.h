#pragma once

#include <cstdint>

namespace roundpipe::runtime {

// How one tensor of a batch is cut into microbatches.
struct Cut {
  enum class Kind {
    kAutomatic,  // along dimension 0 if the tensor has as many rows as the batch; otherwise every microbatch gets it
                 // whole
    kAlong,      // along `dimension`, as at::tensor_split cuts: larger parts first
    kWhole,      // every microbatch gets it whole
  };
  Kind kind = Kind::kAutomatic;
  int64_t dimension = 0;

  static Cut along(int64_t dimension) { return {Kind::kAlong, dimension}; }
  static Cut whole() { return {Kind::kWhole, 0}; }
};

}  // namespace roundpipe::runtime
