#include <roundpipe/runtime/call/job_results.h>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

using namespace roundpipe::runtime;
using roundpipe::Cancelled;

TEST_SUITE("job results") {
  using Kind = JobResult::Kind;

  TEST_CASE("each result counts once, whichever attempt delivers it, and a late attempt delivers nothing") {
    JobResults results;
    int published = 0;
    const auto publish = [&] { ++published; };
    CHECK(results.deliver(0, {Kind::kValues, 2, 0, 1}, publish));
    CHECK_FALSE(results.deliver(0, {Kind::kValues, 2, 0, 1}, publish));
    CHECK(results.begin_again() == 1);
    CHECK_FALSE(results.deliver(0, {Kind::kSum, 2}, publish));
    CHECK_FALSE(results.deliver(1, {Kind::kValues, 2, 0, 1}, publish));
    CHECK(results.deliver(1, {Kind::kSum, 2}, publish));
    CHECK(published == 2);
    CHECK_THROWS_AS(results.read(0, [] {}), Cancelled);
    CHECK_FALSE(results.finish(0, publish));
    CHECK(results.finish(1, publish));
    CHECK(published == 3);
    CHECK_FALSE(results.begin_again());
    CHECK_FALSE(results.claim(1, {Kind::kValues, 3}));
    CHECK_FALSE(results.give_up());
  }

  TEST_CASE("new values of buffers are the attempt's that ends the job") {
    JobResults results;
    const JobResult buffers{Kind::kBuffers, 4};
    CHECK(results.claim(0, buffers));
    CHECK_FALSE(results.claim(0, buffers));
    CHECK(results.begin_again() == 1);
    CHECK_FALSE(results.claim(0, buffers));
    CHECK(results.claim(1, buffers));
    CHECK_FALSE(results.claim(1, buffers));
  }
}
