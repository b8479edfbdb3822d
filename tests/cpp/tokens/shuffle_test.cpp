#include <roundpipe/tokens/shuffle.h>

#include <algorithm>
#include <numeric>
#include <string>

#include <doctest/doctest.h>

#include <roundpipe/tokens/blake2b.h>

namespace roundpipe::tokens {
namespace {

std::vector<int64_t> first(const Shuffle& shuffle, int64_t count) {
  std::vector<int64_t> numbers;
  for (int64_t position = 0; position < count; ++position) numbers.push_back(shuffle.at(position));
  return numbers;
}

TEST_CASE("shuffle: every number is there once") {
  for (const int64_t count : {1, 2, 7, 1023, 1024, 1025, 3000, 4096, 4097}) {
    for (const int64_t epoch : {0, 1}) {
      std::vector<int64_t> numbers = first(epoch_order(count, "-5", epoch), count);
      std::ranges::sort(numbers);
      std::vector<int64_t> all(static_cast<size_t>(count));
      std::iota(all.begin(), all.end(), int64_t{0});
      CHECK(numbers == all);
    }
  }
}

TEST_CASE("shuffle: of many numbers, any part can be asked for") {
  const int64_t count = int64_t{1} << 40;
  const Shuffle shuffle(count, "key");
  for (int64_t position = 0; position < count; position += count / 97) {
    CHECK(shuffle.at(position) >= 0);
    CHECK(shuffle.at(position) < count);
  }
}

TEST_CASE("shuffle: orders stay what they are") {
  // Runs that go on after an update rely on these numbers.
  CHECK(first(epoch_order(12, "0", 0), 12) == std::vector<int64_t>{7, 4, 0, 11, 2, 1, 6, 8, 9, 3, 10, 5});
  CHECK(first(epoch_order(1'000'000, "0", 0), 5) == std::vector<int64_t>{352006, 676274, 484006, 806178, 949032});
  CHECK(first(held_out_order(12, "0"), 12) == first(Shuffle(12, "('held out', 0)"), 12));
}

TEST_CASE("shuffle: each number is everywhere as often") {
  constexpr int64_t kCount = 6, kDraws = 3000;
  double places[kCount][kCount] = {};
  for (int64_t seed = 0; seed < kDraws; ++seed) {
    const Shuffle shuffle(kCount, std::to_string(seed));
    for (int64_t place = 0; place < kCount; ++place) ++places[place][shuffle.at(place)];
  }
  const double expected = static_cast<double>(kDraws) / kCount;
  double chi_squared = 0;
  for (const auto& row : places) {
    for (const double found : row) chi_squared += (found - expected) * (found - expected) / expected;
  }
  CHECK(chi_squared < 60);  // 25 degrees of freedom: 1 in 10,000 is above 59
}

TEST_CASE("shuffle: its keys are those of hashlib.blake2b") {
  CHECK(blake2b("")[0] == 0x2df57733421128b3);
  CHECK(blake2b(std::string(128, 'a'))[5] == 0xdb66355ad1af4df4);
  CHECK(blake2b(std::string(129, 'a'))[0] == 0x4c83811393fba9d7);
}

}  // namespace
}  // namespace roundpipe::tokens
