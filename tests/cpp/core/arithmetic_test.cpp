#include <roundpipe/core/arithmetic.h>

#include <stdexcept>

#include <doctest/doctest.h>

using namespace roundpipe;

TEST_CASE("arithmetic: names, and what is said when a training goes on in another form") {
  for (const char* const name : {"exact", "fast"}) CHECK(arithmetic_name(parse_arithmetic(name)) == name);
  CHECK_THROWS_WITH_AS(parse_arithmetic("Fast"), "[arithmetic] the arithmetic is 'Fast', expected exact or fast",
                       std::invalid_argument);
  CHECK(changed_arithmetic("fast", Arithmetic::kFast, "m").empty());
  CHECK(changed_arithmetic("", Arithmetic::kExact, "m").empty());
  CHECK(changed_arithmetic("", Arithmetic::kFast, "m")
            .find("m computes in fast arithmetic, and the checkpoint in "
                  "exact") != std::string::npos);
  CHECK(changed_arithmetic("fast", Arithmetic::kExact, "m").find("arithmetic=\"fast\" keeps") != std::string::npos);
}
