#include <roundpipe/device/accelerator/completion_thread.h>

#include <optional>

#include <doctest/doctest.h>

using roundpipe::device::StreamClock;

TEST_CASE("stream clock: without a clock of the stream's, a point is passed when it is seen to be") {
  StreamClock clock;
  CHECK(clock.passed_ms(1, 5, std::nullopt) == 5);
  CHECK(clock.passed_ms(2, 9, std::nullopt) == 9);
}

TEST_CASE("stream clock: what lies between two points is what the stream says, however late the host looks") {
  StreamClock clock;
  const double first_ms = clock.passed_ms(1, 5, std::nullopt);
  CHECK(clock.passed_ms(2, 50, 3.0) == first_ms + 3);
  CHECK(clock.passed_ms(2, 50, 4.0) == first_ms + 7);
}

TEST_CASE("stream clock: a point is never before it was asked for, after it was seen, or before the one before") {
  StreamClock clock;
  CHECK(clock.passed_ms(1, 20, std::nullopt) == 20);  // seen late
  CHECK(clock.passed_ms(2, 22, 5.0) == 22);           // which the next event shows
  CHECK(clock.passed_ms(40, 60, 5.0) == 40);          // the stream was idle meanwhile
  CHECK(clock.passed_ms(40, 60, -1.0) == 40);
}
