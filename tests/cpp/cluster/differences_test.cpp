#include <roundpipe/cluster/differences.h>

#include <doctest/doctest.h>

using namespace roundpipe::cluster;

TEST_SUITE("differences") {
  TEST_CASE("ranks in words") {
    CHECK(ranks_in_words({2}) == "rank 2");
    CHECK(ranks_in_words({0, 1}) == "ranks 0 and 1");
    CHECK(ranks_in_words({0, 2, 5}) == "ranks 0, 2 and 5");
  }

  TEST_CASE("who holds what") { CHECK(held({"a", "b", "a"}) == "ranks 0 and 2 have a, rank 1 has b"); }

  TEST_CASE("only differences are named") {
    const Told first{{"lr", "0.1"}, {"eps", "1e-8"}}, second{{"lr", "0.2"}, {"eps", "1e-8"}};
    CHECK(differences({first, second}) == "lr: rank 0 has 0.1, rank 1 has 0.2");
    CHECK(differences({first, first}).empty());
  }

  TEST_CASE("what a rank does not name it has not got") {
    CHECK(differences({{}, {{"layer.bias", "4 float32"}}}) == "layer.bias: rank 0 has none, rank 1 has 4 float32");
  }

  TEST_CASE("many differences are counted") {
    std::vector<Told> told(2);
    for (size_t rank = 0; rank < 2; ++rank) {
      for (int i = 0; i < 7; ++i) told[rank].emplace_back(std::to_string(i), std::to_string(rank));
    }
    CHECK(differences(told) ==
          "0: rank 0 has 0, rank 1 has 1; 1: rank 0 has 0, rank 1 has 1; 2: rank 0 has 0, rank 1 has 1; 3: rank 0 has "
          "0, rank 1 has 1; and 3 more");
  }

  TEST_CASE("a digest knows names from values, and no order") {
    CHECK(digest_of({{"a", "b"}, {"c", "d"}}) == digest_of({{"c", "d"}, {"a", "b"}}));
    CHECK(digest_of({{"a", "b"}}) != digest_of({{"b", "a"}}));
    CHECK(digest_of({{"a", "bc"}}) != digest_of({{"ab", "c"}}));
    CHECK(digest_of({{"a", "x"}, {"a", "b"}}) == digest_of({{"a", "b"}}));
  }
}
