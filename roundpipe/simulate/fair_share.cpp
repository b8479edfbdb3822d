#include <roundpipe/simulate/fair_share.h>

#include <limits>

namespace roundpipe::simulate {

double fair_share(double total, std::initializer_list<Claim> claims) {
  double level = 0;
  while (true) {
    // Those that need no more than the last level take what they need; the next level is higher.
    double left = total;
    int sharing = 0;
    for (const Claim& claim : claims) {
      if (claim.most <= level)
        left -= claim.count * claim.most;
      else
        sharing += claim.count;
    }
    if (sharing == 0) return std::numeric_limits<double>::infinity();
    const double next = left / sharing;
    if (next <= level) return level;
    level = next;
  }
}

}  // namespace roundpipe::simulate
