#include <roundpipe/core/skipped_steps.h>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

using roundpipe::SkippedSteps;

TEST_CASE("skipped steps: they are counted, on top of those of before") {
  SkippedSteps steps(3);
  steps.add(1, false, 65536);
  CHECK(steps.count() == 3);
  steps.add(2, true, 65536);
  steps.add(3, true, 2);
  CHECK(steps.count() == 5);
}

TEST_CASE("skipped steps: an overflow ends the run once the scale cannot be its cause") {
  SkippedSteps steps;
  steps.add(1, false, 0.5);
  steps.add(2, true, 1.5);
  for (const double scale : {1.0, 0.25}) {
    CHECK_THROWS_WITH_AS(steps.add(3, true, scale), doctest::Contains("--dtype bfloat16"), roundpipe::Error);
  }
  CHECK(steps.count() == 3);
}

TEST_CASE("skipped steps: the message says which step it was and how many there were") {
  SkippedSteps steps(16);
  CHECK_THROWS_WITH_AS(steps.add(17, true, 1),
                       doctest::Contains("step 17 is inf or NaN although its loss was scaled by 1, and 17 steps"),
                       roundpipe::Error);
}
