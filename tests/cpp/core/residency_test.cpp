#include <roundpipe/core/residency.h>

#include <doctest/doctest.h>

using namespace roundpipe;

namespace {

// Layers of 100 bytes, of which 80 are frozen, one in each visit: forward, then backward.
std::vector<WeightVisit> visits_of(int layers) {
  std::vector<WeightVisit> visits;
  const auto visit = [&](int layer) { visits.push_back({100, {{static_cast<uint64_t>(layer), 80}}}); };
  for (int layer = 0; layer < layers; ++layer) visit(layer);
  for (int layer = layers; layer-- > 0;) visit(layer);
  return visits;
}

std::vector<FrozenBlock> candidates_of(int layers) {
  std::vector<FrozenBlock> blocks;
  for (int layer = 0; layer < layers; ++layer) blocks.push_back({static_cast<uint64_t>(layer), 80});
  return blocks;
}

std::set<uint64_t> chosen_with(int64_t cap_bytes, int64_t work_bytes = 0, int64_t most_bytes = -1) {
  return choose_residents(visits_of(4), candidates_of(4), {cap_bytes, work_bytes, most_bytes});
}

}  // namespace

TEST_CASE("residency: a slot has room for what is not resident, also of a block that two layers share") {
  const WeightVisit visit{300, {{1, 80}, {2, 40}, {1, 80}}};
  CHECK(slot_bytes(visit, {}) == 300);
  CHECK(slot_bytes(visit, {2}) == 260);
  CHECK(slot_bytes(visit, {1}) == 140);
}

TEST_CASE("residency: an arena holds the largest two jobs in a row, from the last to the first, too") {
  const std::vector<WeightVisit> visits{{10, {}}, {40, {{1, 30}}}, {20, {}}, {70, {}}};
  CHECK(pair_bytes(visits, {}) == 90);
  CHECK(pair_bytes(std::span(visits).first(3), {}) == 60);
  CHECK(pair_bytes(std::span(visits).first(3), {1}) == 30);
  CHECK(pair_bytes(std::span(visits).first(1), {}) == 20);
  CHECK(pair_bytes({}, {}) == 0);
}

TEST_CASE("residency: nothing without a cap, all with room, else the first that have room beside arena and work") {
  CHECK(chosen_with(0).empty());
  CHECK(chosen_with(16 * 1000).size() == 4);
  CHECK(chosen_with(480).size() == 4);
  // 320 for all, and 40 for an arena of adapters.
  CHECK(chosen_with(384).size() == 4);
  // 80 for the first, and 200 for an arena: the last layer is visited twice in a row.
  CHECK(chosen_with(368) == std::set<uint64_t>{0});
  CHECK(chosen_with(300) == std::set<uint64_t>{0});
  CHECK(chosen_with(290).empty());
  CHECK(chosen_with(384, 150).empty());
}

TEST_CASE("residency: one part in 16 of a cap stays free, and work comes first") {
  CHECK(chosen_with(16 * 24, 0).size() == 4);
  CHECK(chosen_with(16 * 24, 1).size() < 4);
  CHECK(chosen_with(16 * 32, 120).size() == 4);
  CHECK(chosen_with(16 * 32, 121).size() < 4);
}

TEST_CASE("residency: no more than `most_bytes`, and earlier candidates first") {
  CHECK(chosen_with(16 * 1000, 0, 160) == std::set<uint64_t>{0, 1});
  CHECK(chosen_with(16 * 1000, 0, 0).empty());
  const std::vector<FrozenBlock> order{{3, 80}, {9, 50}, {0, 80}};
  CHECK(choose_residents(visits_of(4), order, {16 * 1000, 0, 130}) == std::set<uint64_t>{3, 9});
}
