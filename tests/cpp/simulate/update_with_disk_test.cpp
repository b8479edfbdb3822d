#include <roundpipe/simulate/update_with_disk.h>

#include <cmath>

#include <doctest/doctest.h>

using namespace roundpipe::simulate;

TEST_CASE("update with disk: the slower of updates and the disk counts") {
  // 4 bytes of moments on the disk for each of the weights, which a disk of 3 GB/s moves for 0.75 GB of weights.
  CHECK(update_rate_with_disk(6, 3, 100, 400) == doctest::Approx(0.75));
  CHECK(update_rate_with_disk(0, 3, 100, 400) == doctest::Approx(0.75));
  CHECK(update_rate_with_disk(0.5, 3, 100, 400) == doctest::Approx(0.5));
  CHECK(update_rate_with_disk(6, 3, 100, 0) == 6);
  CHECK(update_rate_with_disk(6, 0, 100, 400) == 6);
}

TEST_CASE("update with disk: days until a disk has been written as often as it is meant to be") {
  CHECK(days_of_disk(600e12, 64'000'000'000, 24 * 3600 * 1000.0) == doctest::Approx(9375));
  CHECK(std::isinf(days_of_disk(600e12, 0, 1000)));
}
