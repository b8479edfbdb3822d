#include <roundpipe/core/loss_check.h>

#include <doctest/doctest.h>

#include <cstdlib>
#include <stdexcept>

using roundpipe::checks_losses;

TEST_CASE("loss check: the variable turns it off, and nothing else does") {
  const char* const name = "ROUNDPIPE_CHECK_LOSS";
  unsetenv(name);
  CHECK(checks_losses());
  setenv(name, "1", 1);
  CHECK(checks_losses());
  setenv(name, "0", 1);
  CHECK_FALSE(checks_losses());
  for (const char* const odd : {"", "no", "00"}) {
    setenv(name, odd, 1);
    CHECK_THROWS_WITH_AS(checks_losses(), doctest::Contains("expected 0 (a NaN loss is no error) or 1"),
                         std::invalid_argument);
  }
  unsetenv(name);
}
