#include <roundpipe/optim/shards.h>

#include <numeric>

#include <doctest/doctest.h>

using namespace roundpipe::optim;

TEST_CASE("shards: together they hold every element once, in order, cut at the grain only") {
  for (const std::vector<int64_t>& elements : {std::vector<int64_t>{1},
                                               {0, 5, 0},
                                               {10 * kShardGrain, 3, kShardGrain + 1},
                                               {64, 64, 64, 7 * kShardGrain - 1}}) {
    for (const int count : {1, 2, 3, 7}) {
      CAPTURE(count);
      const Shards shards = cut_into_shards(elements, count);
      REQUIRE(shards.size() == static_cast<size_t>(count));
      for (size_t p = 0; p < elements.size(); ++p) {
        int64_t next = 0;
        for (const auto& shard : shards) {
          if (shard[p].count() == 0) continue;
          CHECK(shard[p].first == next);
          CHECK(shard[p].first % kShardGrain == 0);
          next = shard[p].last;
        }
        CHECK(next == elements[p]);
      }
      // A shard's parameters follow those of the shard before.
      size_t last_parameter = 0;
      for (const auto& shard : shards) {
        for (size_t p = 0; p < elements.size(); ++p) {
          if (shard[p].count() == 0) continue;
          CHECK(p >= last_parameter);
          last_parameter = p;
        }
      }
    }
  }
}

TEST_CASE("shards: of large parameters, they are within a grain of equal") {
  const std::vector<int64_t> elements{100 * kShardGrain + 17, 3 * kShardGrain, 5};
  const int64_t total = std::accumulate(elements.begin(), elements.end(), int64_t{0});
  for (const auto& shard : cut_into_shards(elements, 4)) {
    int64_t held = 0;
    for (const ElementRange& range : shard) held += range.count();
    CHECK(std::abs(held - total / 4) <= kShardGrain);
  }
}
