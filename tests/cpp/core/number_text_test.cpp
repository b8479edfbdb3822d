#include <roundpipe/core/number_text.h>

#include <cmath>
#include <limits>

#include <doctest/doctest.h>

using roundpipe::number_text;

TEST_CASE("number text: the shortest that is the number") {
  CHECK(number_text(0.1) == "0.1");
  CHECK(number_text(1e-5) == "1e-05");
  CHECK(number_text(2) == "2");
  CHECK(number_text(-std::numeric_limits<double>::infinity()) == "-inf");
  CHECK(number_text(std::copysign(std::nan(""), -1)) == "nan");
  CHECK(number_text(std::numeric_limits<double>::denorm_min()) == "5e-324");
}
