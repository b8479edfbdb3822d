#include <roundpipe/simulate/fair_share.h>

#include <limits>

#include <doctest/doctest.h>

using roundpipe::simulate::fair_share;

TEST_CASE("fair share: even parts, of which nobody takes more than it can") {
  constexpr double kNever = std::numeric_limits<double>::infinity();
  // Enough for all: nobody is held back.
  CHECK(fair_share(60, {{2, 25}}) == kNever);
  CHECK(fair_share(60, {}) == kNever);
  CHECK(fair_share(60, {{0, kNever}, {1, 60}}) == kNever);
  CHECK(fair_share(60, {{3, 25}}) == 20);
  CHECK(fair_share(60, {{3, 25}, {1, kNever}}) == 15);
  // Two links of 12 leave 36 to the update.
  CHECK(fair_share(60, {{2, 12}, {1, kNever}}) == 36);
  CHECK(fair_share(60, {{1, 5}, {1, 25}, {1, kNever}}) == 30);
  CHECK(fair_share(60, {{1, 5}, {1, 40}, {1, kNever}}) == 27.5);
}
