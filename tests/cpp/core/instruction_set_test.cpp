#include <roundpipe/core/instruction_set.h>

#include <stdexcept>

#include <doctest/doctest.h>

using namespace roundpipe;

TEST_CASE("instruction sets: the baseline is always there, and each can be chosen") {
  const std::vector<std::string> sets = instruction_sets();
  CHECK(sets.front() == "baseline");
  for (const std::string& set : sets) {
    set_instruction_set(set);
    CHECK(instruction_set() == set);
  }
}

TEST_CASE("instruction sets: one that is not there is refused with those that are") {
  for (const char* name : {"", "sse9", "AVX2", "neon "}) {
    CHECK_THROWS_WITH_AS(set_instruction_set(name), doctest::Contains("baseline"), std::invalid_argument);
  }
  CHECK(instruction_set() == instruction_sets().back());
}
