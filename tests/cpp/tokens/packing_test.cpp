#include <roundpipe/tokens/packing.h>

#include <algorithm>
#include <numeric>
#include <stdexcept>
#include <string>

#include <doctest/doctest.h>

#include <roundpipe/tokens/shuffle.h>

namespace roundpipe::tokens {
namespace {

using Assigned = std::vector<std::vector<int64_t>>;

TEST_CASE("packing: best fit takes the fullest row") {
  CHECK(assign_rows({5, 7, 3, 5}, 10) == Assigned{{0, 3}, {1, 2}});
  CHECK(assign_rows({6, 5, 4, 5}, 10) == Assigned{{0, 2}, {1, 3}});
  CHECK(assign_rows({4, 0, 0}, 4) == Assigned{{0, 1, 2}});
  CHECK(assign_rows({}, 4).empty());
}

TEST_CASE("packing: rows are few and in order") {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    std::vector<int64_t> lengths;
    const Shuffle order(1 + static_cast<int64_t>(seed % 20), std::to_string(seed));
    for (int64_t place = 0; place < order.count(); ++place) lengths.push_back(1 + order.at(place) * 7 % 9);
    const Assigned rows = assign_rows(lengths, 12);
    std::vector<int64_t> seen, firsts, loads;
    for (const auto& row : rows) {
      CHECK(std::ranges::is_sorted(row));
      firsts.push_back(row.front());
      seen.insert(seen.end(), row.begin(), row.end());
      loads.push_back(0);
      for (const int64_t sample : row) loads.back() += lengths[static_cast<size_t>(sample)];
    }
    CHECK(std::ranges::is_sorted(firsts));
    std::ranges::sort(seen);
    std::vector<int64_t> all(lengths.size());
    std::iota(all.begin(), all.end(), int64_t{0});
    CHECK(seen == all);
    // Decreasing fits leave no two rows that would fit into one.
    std::ranges::sort(loads);
    CHECK(loads.back() <= 12);
    CHECK((loads.size() < 2 || loads[0] + loads[1] > 12));
  }
}

TEST_CASE("packing: a length that fits no row") {
  CHECK_THROWS_WITH_AS(assign_rows({1, 5}, 4), "[assign_rows] length 1 is 5, expected 0 to 4", std::invalid_argument);
  CHECK_THROWS_AS(assign_rows({-1}, 4), std::invalid_argument);
}

}  // namespace
}  // namespace roundpipe::tokens
