#include <roundpipe/schedule/partition.h>

#include <algorithm>
#include <limits>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

using namespace roundpipe::schedule;

namespace {

struct Score {
  double largest = 0, squares = 0;
};

Score score_of(const std::vector<double>& cost, const std::vector<Range>& stages) {
  Score score;
  for (const Range& stage : stages) {
    double sum = 0;
    for (int layer = stage.first; layer < stage.last; ++layer) sum += cost[static_cast<std::size_t>(layer)];
    score.largest = std::max(score.largest, sum);
    score.squares += sum * sum;
  }
  return score;
}

bool fits(const std::vector<std::int64_t>& bytes, std::int64_t cap, const std::vector<Range>& stages) {
  return cap == 0 || std::ranges::all_of(stages, [&](Range stage) {
           std::int64_t sum = 0;
           for (int layer = stage.first; layer < stage.last; ++layer) sum += bytes[static_cast<std::size_t>(layer)];
           return sum <= cap;
         });
}

// Every way to cut `layers` into stages, as bit masks of the boundaries.
std::vector<Range> cut_at(int layers, unsigned mask) {
  std::vector<Range> stages;
  int first = 0;
  for (int last = 1; last <= layers; ++last) {
    if (last == layers || (mask >> (last - 1) & 1u)) stages.push_back({std::exchange(first, last), last});
  }
  return stages;
}

}  // namespace

TEST_CASE("partition: as good as brute force on small cases") {
  std::mt19937 random(1);
  for (int round = 0; round < 1500; ++round) {
    const int layers = 1 + static_cast<int>(random() % 9);
    const int stages = 1 + static_cast<int>(random() % 10);
    const bool whole = random() % 2;
    std::vector<double> cost;
    std::vector<std::int64_t> bytes;
    for (int layer = 0; layer < layers; ++layer) {
      cost.push_back(whole ? static_cast<double>(random() % 4) : static_cast<double>(random() % 1000) / 333);
      bytes.push_back(static_cast<std::int64_t>(random() % 5));
    }
    const std::int64_t cap = random() % 2 ? 0 : static_cast<std::int64_t>(4 + random() % 8);

    std::vector<Score> best(static_cast<std::size_t>(layers) + 1, {std::numeric_limits<double>::infinity(), 0});
    for (unsigned mask = 0; mask < 1u << (layers - 1); ++mask) {
      const std::vector<Range> candidate = cut_at(layers, mask);
      if (!fits(bytes, cap, candidate)) continue;
      const Score score = score_of(cost, candidate);
      Score& known = best[candidate.size()];
      if (score.largest < known.largest - 1e-9 ||
          (score.largest < known.largest + 1e-9 && score.squares < known.squares))
        known = score;
    }
    std::size_t expected = static_cast<std::size_t>(std::min(stages, layers));
    while (best[expected].largest == std::numeric_limits<double>::infinity()) ++expected;

    const std::vector<Range> found = balanced_partition(cost, stages, bytes, cap);
    REQUIRE(found.size() == expected);
    int next = 0;
    for (const Range& stage : found) {
      REQUIRE(stage.first == next);
      REQUIRE(stage.size() > 0);
      next = stage.last;
    }
    REQUIRE(next == layers);
    REQUIRE(fits(bytes, cap, found));
    const Score score = score_of(cost, found);
    REQUIRE(score.largest == doctest::Approx(best[expected].largest).epsilon(1e-9));
    REQUIRE(score.squares == doctest::Approx(best[expected].squares).epsilon(1e-9));

    // fewest_stages: the smallest count whose best largest stage is within the limit.
    const double limit = std::max(*std::ranges::max_element(cost), static_cast<double>(random() % 8) + 0.5);
    std::size_t fewest = 1;
    while (best[fewest].largest > limit + 1e-9) ++fewest;
    REQUIRE(fewest_stages(cost, limit + 1e-9, bytes, cap) == static_cast<int>(fewest));
  }
}

TEST_CASE("partition: equal layers give equal stages, larger ones last") {
  for (double layer_cost : {1.0, 0.1, 1.0 / 3, 1e-7, 0.0}) {
    const std::vector<double> cost(7, layer_cost);
    CHECK(balanced_partition(cost, 7).size() == 7);
    if (layer_cost > 0) CHECK(balanced_partition(cost, 3) == std::vector<Range>{{0, 2}, {2, 4}, {4, 7}});
  }
  CHECK(balanced_partition(std::vector<double>{5}, 4) == std::vector<Range>{{0, 1}});
}

TEST_CASE("partition: a thousand layers") {
  std::vector<double> cost(1000);
  std::mt19937 random(2);
  for (double& c : cost) c = 0.6 + static_cast<double>(random() % 1000) / 1250;
  const auto stages = balanced_partition(cost, 64);
  CHECK(stages.size() == 64);
  CHECK(stages == balanced_partition(cost, 64));
}

TEST_CASE("partition: bad arguments are named") {
  const std::vector<double> cost{1, 2, 3};
  const std::vector<std::int64_t> bytes{1, 9, 1};
  using doctest::Contains;
  CHECK_THROWS_WITH_AS(balanced_partition(cost, 2, bytes, 8), Contains("layer 1 needs 9 bytes"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(balanced_partition(cost, 0), Contains("stages is 0"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(balanced_partition({}, 1), Contains("cost is empty"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(balanced_partition(cost, 1, {}, 8), Contains("bytes is empty"), std::invalid_argument);
  CHECK_THROWS_WITH_AS(balanced_partition(cost, 1, std::vector<std::int64_t>{1}), Contains("1 entries"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(balanced_partition(std::vector<double>{1, -1}, 1), Contains("layer 1 costs"),
                       std::invalid_argument);
  CHECK_THROWS_WITH_AS(fewest_stages(cost, -1), Contains("max_stage_cost"), std::invalid_argument);
}
