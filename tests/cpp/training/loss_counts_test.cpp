#include <roundpipe/training/loss_counts.h>

#include <functional>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

#include "../local_group.h"

using namespace roundpipe;
using namespace roundpipe::support;

namespace {

using Calls = std::function<double(LossCounts&, int rank)>;

struct Outcome {
  double factor = 0;
  std::string error = "none";
};

std::vector<Outcome> outcomes_of(int count, const Calls& calls) {
  const auto meeting = std::make_shared<Meeting>(count);
  return on_ranks(count, [&](int rank) {
    const auto control =
        std::make_shared<cluster::Control>(c10::make_intrusive<LocalGroup>(meeting, rank), std::chrono::seconds(60));
    LossCounts counts(std::make_shared<cluster::Agreement>(control, "Net"));
    Outcome outcome;
    try {
      outcome.factor = calls(counts, rank);
    } catch (const std::exception& error) {
      outcome.error = error.what();
    }
    // Whatever went before, the next step is one of its own.
    CHECK(counts.step({}) == 1.0 / count);
    return outcome;
  });
}

}  // namespace

TEST_SUITE("loss counts") {
  TEST_CASE("losses of the user are averaged, also by a node without calls") {
    const auto calls = [](LossCounts& counts, int rank) {
      if (rank != 1) counts.note_users_loss();
      return counts.step({{"lr", "0.1"}});
    };
    for (const Outcome& outcome : outcomes_of(3, calls)) CHECK(outcome.factor == 1.0 / 3);
  }

  TEST_CASE("the model's own loss is over the labels of all nodes, of which some make fewer calls") {
    const auto calls = [](LossCounts& counts, int rank) {
      for (int call = 0; call < rank; ++call) {
        // Node 1 makes one call, and node 2 two.
        CHECK(counts.total(10 * rank + call, std::nullopt) == (call == 0 ? 30 : 21));
      }
      return counts.step({});
    };
    for (const Outcome& outcome : outcomes_of(3, calls)) CHECK(outcome.factor == 1.0);
  }

  TEST_CASE("a number of items is each node's own, and those of all nodes are added") {
    const auto calls = [](LossCounts& counts, int rank) {
      CHECK(counts.total(5, rank + 3.0) == 7.0);
      return counts.step({});
    };
    for (const Outcome& outcome : outcomes_of(2, calls)) CHECK(outcome.factor == 1.0);
    const auto of_all = [](LossCounts& counts, int rank) {
      counts.total(rank + 3, 7.0);
      return counts.step({});
    };
    for (const Outcome& outcome : outcomes_of(2, of_all))
      CHECK(
          outcome.error.starts_with("[distributed] num_items_in_batch was 7 on every rank, which is how many labels"));
  }

  TEST_CASE("losses of several kinds are refused") {
    const auto calls = [](LossCounts& counts, int rank) {
      if (rank == 0) counts.note_users_loss();
      if (rank == 1) counts.total(1, std::nullopt);
      return counts.step({});
    };
    for (const Outcome& outcome : outcomes_of(2, calls))
      CHECK(outcome.error ==
            "[distributed] the ranks use losses of several kinds in one step: rank 0 has a loss of the user, rank 1 "
            "has the model's own loss; expected one kind, as a user's loss is averaged over the nodes and the model's "
            "own is added");
  }

  TEST_CASE("a node that failed tells the others, and none steps") {
    const auto calls = [](LossCounts& counts, int rank) -> double {
      if (rank != 1) return counts.step({});
      counts.tell_failure("OnPurpose: in a layer");
      throw std::runtime_error("its own");
    };
    const std::vector<Outcome> outcomes = outcomes_of(3, calls);
    CHECK(outcomes[1].error == "its own");
    for (const size_t rank : {0, 2})
      CHECK(outcomes[rank].error.starts_with(
          "[distributed] a call of model 1 (Net) failed on rank 1 (OnPurpose: in a layer), so the gradients of this "));
  }

  TEST_CASE("steps that differ are refused by name") {
    const auto calls = [](LossCounts& counts, int rank) { return counts.step({{"lr", rank == 0 ? "0.1" : "0.2"}}); };
    for (const Outcome& outcome : outcomes_of(2, calls))
      CHECK(outcome.error ==
            "[distributed] the ranks differ in model 1 (Net): lr: rank 0 has 0.1, rank 1 has 0.2; expected the same "
            "step on every rank");
  }

  TEST_CASE("what calls have used is saved and loaded") {
    const auto calls = [](LossCounts& counts, int rank) {
      counts.total(rank + 1, std::nullopt);
      const LossCounts::State state = counts.state();
      CHECK(state.used == "the model's own loss");
      CHECK(state.labels == rank + 1);
      counts.load(std::nullopt);
      CHECK_FALSE(counts.state().used);
      counts.load(state);
      CHECK_THROWS_AS(counts.note_users_loss(), std::invalid_argument);
      CHECK_THROWS_AS(counts.load(LossCounts::State{"another loss"}), std::invalid_argument);
      return counts.step({});
    };
    for (const Outcome& outcome : outcomes_of(2, calls)) CHECK(outcome.factor == 1.0);
  }
}
