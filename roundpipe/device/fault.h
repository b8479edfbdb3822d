#pragma once

#include <string_view>

namespace roundpipe::device {

// A fault that a virtual device gets on purpose, so that programs can see what happens then. A device counts the
// microbatches that its jobs begin to compute; the fault strikes at number `at` of those after it was set.
struct Fault {
  enum class Kind {
    kError,  // from then on, every queue of the device returns an error
    kHang,   // the device's compute thread stops until Device::release_hang()
    kSlow,   // from then on, each microbatch takes `slow_ms` longer
    kBits,   // from then on, each copy to the host has one bit wrong
  };
  Kind kind = Kind::kError;
  int at = 1;
  double slow_ms = 0;
};

// "error@30", "hang@30", "bits@30", "slow@30+5ms". Throws std::invalid_argument for anything else.
Fault parse_fault(std::string_view text);

}  // namespace roundpipe::device
