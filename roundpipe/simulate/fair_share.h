#pragma once

#include <initializer_list>

namespace roundpipe::simulate {

// `count` users of a shared bandwidth, each of which can take `most` of it; `most` may be infinite.
struct Claim {
  int count = 0;
  double most = 0;
};

// How much of `total` each claim gets if it is shared evenly: who needs less than an even part leaves the rest to the
// others. A claim gets this or its own `most`, whichever is less; infinite if there is enough for all.
double fair_share(double total, std::initializer_list<Claim> claims);

}  // namespace roundpipe::simulate
