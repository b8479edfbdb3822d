#include <roundpipe/runs/own_state.h>

#include <stdexcept>

#include <doctest/doctest.h>

#include "saved_ranks.h"

using namespace roundpipe;
using nlohmann::ordered_json;

namespace {

// What one of the ranks has saved for itself.
struct Rank {
  int64_t seed = 0;
  int64_t drawn = 0;  // from its generator
  std::vector<std::pair<std::string, StateValue>> values = {};
  bool has_gradient = false;
};

std::string saved_by(const support::TemporaryFolder& folder, const std::vector<Rank>& ranks) {
  const auto size = static_cast<int64_t>(ranks.size());
  std::vector<std::shared_ptr<Contents>> all;
  for (int64_t number = 0; number < size; ++number) {
    const Rank& rank = ranks[static_cast<size_t>(number)];
    const auto contents = std::make_shared<Contents>(number, size);
    ordered_json common{{"step", 4}, {"steps", 4}, {"versions", {{"test", "1"}}}};
    for (const char* const name : {"dtypes", "outside", "tied"}) common[name] = ordered_json::object();
    const StateValue random = StateValue::dict({{"torch", at::full({8}, rank.drawn, at::kByte)}});
    ordered_json own{{"pipelines", {{"", {{"calls", 3}, {"random_seed", rank.seed}, {"num_microbatch", 2}}}}},
                     {"random", contents->own_encoder().encode(random, "random")},
                     {"loss_counts", {{"used", "labels"}, {"items", 6.0}, {"labels", 5.0}}}};
    ordered_json values = ordered_json::object();
    for (const auto& [name, value] : rank.values)
      values[name] = {{"value", contents->own_encoder().encode(value, "state." + name)}};
    own["state"] = values;
    if (size == 1) common.update(own);
    contents->set_states(common, own);
    if (number == 0) contents->add(kWeights, {"w", at::zeros(3)});
    if (number > 0) contents->add(kBuffers, {"b", at::full(2, number)});
    if (rank.has_gradient) contents->add(kGradients, {"w", at::full(3, number)});
    all.push_back(contents);
  }
  Together together(size);
  for (const auto& work : save_together(folder.path(), together, all)) work->wait();
  return folder.path() + "/step-4";
}

std::string refused(const OwnState& own, bool strict) {
  try {
    own.check(strict);
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "";
}

}  // namespace

TEST_SUITE("own state") {
  TEST_CASE("as many ranks take their own") {
    const support::TemporaryFolder folder;
    StoredCheckpoint stored(saved_by(folder, {{.seed = 5, .drawn = 1, .values = {{"z", 1}, {"a", 2}}},
                                              {.seed = 6, .drawn = 2, .values = {{"z", 3}, {"m", 4}}}}));
    for (const int64_t rank : {0, 1}) {
      const OwnState own(stored, rank, 2);
      CHECK(refused(own, true).empty());
      CHECK(own.names() == (rank == 0 ? std::vector<std::string>{"z", "a"} : std::vector<std::string>{"z", "m"}));
      CHECK(own.value("z").as_int() == (rank == 0 ? 1 : 3));
      CHECK((own.has_seed("") && own.has_random_states()));
      CHECK(own.model("")->at("random_seed") == 5 + rank);
      CHECK(own.model("other") == nullptr);
      CHECK(own.random_states().at("torch").as_tensor()[0].item<int64_t>() == 1 + rank);
      CHECK(own.buffers().size() == static_cast<size_t>(rank));
      CHECK(own.loss_counts().at("used") == "labels");
    }
  }

  TEST_CASE("others share what was the same on all, and a rank that was there keeps its random states") {
    const support::TemporaryFolder folder;
    const StateValue same = StateValue::dict({{"rows", at::arange(3)}});
    StoredCheckpoint stored(saved_by(folder, {{.seed = 5, .drawn = 1, .values = {{"position", 1}, {"data", same}}},
                                              {.seed = 6, .drawn = 2, .values = {{"position", 2}, {"data", same}}}}));
    for (const int64_t rank : {0, 1, 2}) {
      const OwnState own(stored, rank, 3);
      CHECK(own.names() == std::vector<std::string>{"data"});
      CHECK(own.differing() == std::vector<std::string>{"position"});
      CHECK(refused(own, true).find("state 'position' differs between the 2 ranks") != std::string::npos);
      CHECK(refused(own, false).empty());
      CHECK(own.has_seed("") == (rank < 2));
      CHECK(own.has_random_states() == (rank < 2));
      CHECK(own.model("")->at("random_seed") == (rank == 1 ? 6 : 5));
      CHECK(own.buffers().empty());
      CHECK(own.loss_counts().is_null());
    }
  }

  TEST_CASE("seeds and random states that all ranks had are those of any") {
    const support::TemporaryFolder folder;
    StoredCheckpoint stored(saved_by(folder, {{.seed = 5, .drawn = 1}, {.seed = 5, .drawn = 1}}));
    const OwnState own(stored, 2, 3);
    CHECK((own.has_seed("") && own.has_random_states()));
    const support::TemporaryFolder other;
    StoredCheckpoint alone(saved_by(other, {{.seed = 5, .drawn = 1}}));
    CHECK_FALSE(OwnState(alone, 1, 2).has_seed(""));
    CHECK_FALSE(OwnState(alone, 1, 2).has_random_states());
  }

  TEST_CASE("gradients belong to the batches of their ranks") {
    const support::TemporaryFolder folder;
    StoredCheckpoint stored(saved_by(folder, {{}, {.has_gradient = true}}));
    CHECK(OwnState(stored, 0, 2).gradients().empty());
    CHECK(OwnState(stored, 1, 2).gradients().size() == 1);
    CHECK(refused(OwnState(stored, 1, 2), true).empty());
    const std::string text = refused(OwnState(stored, 0, 1), false);
    CHECK(text.find("has gradients that no step has consumed ('w', of rank 1)") != std::string::npos);
  }
}
