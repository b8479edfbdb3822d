#include <roundpipe/schedule/gradient_groups.h>

#include <vector>

#include <doctest/doctest.h>

using namespace roundpipe::schedule;

TEST_CASE("gradient groups: the cuts of torch.tensor_split") {
  const GradientGroups groups(7, 3);
  REQUIRE(groups.count() == 3);
  CHECK(groups.microbatches({0, 1}) == Range{0, 3});
  CHECK(groups.microbatches({1, 2}) == Range{3, 5});
  CHECK(groups.microbatches({2, 3}) == Range{5, 7});
  CHECK(groups.are_whole({3, 7}));
  CHECK_FALSE(groups.are_whole({3, 6}));
  CHECK(groups.groups_of({3, 7}) == Range{1, 3});
}

TEST_CASE("gradient groups: every microbatch is in one group, sizes differ by one at most, larger ones first") {
  for (int microbatches = 1; microbatches <= 20; ++microbatches) {
    for (int wanted = 1; wanted <= 24; ++wanted) {
      CAPTURE(microbatches);
      CAPTURE(wanted);
      const GradientGroups groups(microbatches, wanted);
      REQUIRE(groups.count() == std::min(microbatches, wanted));
      int next = 0, last_size = microbatches + 1;
      for (int g = 0; g < groups.count(); ++g) {
        const Range part = groups.microbatches({g, g + 1});
        REQUIRE(part.first == next);
        REQUIRE(part.size() >= 1);
        REQUIRE(part.size() <= last_size);
        REQUIRE(groups.groups_of(part) == Range{g, g + 1});
        for (int m = part.first; m < part.last; ++m) {
          REQUIRE(groups.group_of(m) == g);
          REQUIRE(groups.is_boundary(m) == (m == part.first));
        }
        next = part.last;
        last_size = part.size();
      }
      REQUIRE(next == microbatches);
      REQUIRE(groups.is_boundary(microbatches));
      const int first_size = groups.microbatches({0, 1}).size();
      REQUIRE(first_size - last_size <= 1);
    }
  }
}

TEST_CASE("gradient parts: one for a job that begins with the first group, one for each group of another") {
  Plan plan{3, 7, 2, 0, {}};
  plan.jobs = {{Phase::kForward, {0, 2}, {0, 4}, 0},  {Phase::kForward, {0, 2}, {4, 7}, 1},
               {Phase::kFused, {2, 3}, {0, 3}, 0},    {Phase::kFused, {2, 3}, {3, 7}, 1},
               {Phase::kBackward, {1, 2}, {0, 5}, 0}, {Phase::kBackward, {1, 2}, {5, 7}, 1},
               {Phase::kBackward, {0, 1}, {0, 7}, 0}};
  CHECK(gradient_parts(plan, 3) == std::vector<int>{1, 2, 3});
}
