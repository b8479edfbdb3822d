#include <roundpipe/cluster/agreement.h>

#include <functional>

#include <doctest/doctest.h>

#include <roundpipe/cluster/message.h>

#include "../local_group.h"

using namespace roundpipe::cluster;
using namespace roundpipe::support;

namespace {

std::vector<std::shared_ptr<Control>> made_controls(int count, const std::shared_ptr<Meeting>& meeting) {
  std::vector<std::shared_ptr<Control>> controls;
  for (int rank = 0; rank < count; ++rank)
    controls.push_back(
        std::make_shared<Control>(c10::make_intrusive<LocalGroup>(meeting, rank), std::chrono::seconds(60)));
  return controls;
}

using Deed = std::function<void(Agreement&, int rank)>;

// What each rank throws.
std::vector<std::string> errors_of(int count, const Deed& deed) {
  const auto controls = made_controls(count, std::make_shared<Meeting>(count));
  return on_ranks(count, [&](int rank) -> std::string {
    Agreement agreement(controls[static_cast<size_t>(rank)], "Net");
    try {
      deed(agreement, rank);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "none";
  });
}

}  // namespace

TEST_SUITE("agreement") {
  TEST_CASE("messages of any length arrive in the order of the ranks") {
    const std::vector<std::vector<std::string>> rounds{{"", "a", "bc"},
                                                       {std::string(508, 'x'), std::string(509, 'y'), "zzz"},
                                                       {"", std::string(70'000, '\0'), std::string(5'000, 'q')}};
    const auto controls = made_controls(3, std::make_shared<Meeting>(3));
    const auto got = on_ranks(3, [&](int rank) {
      const auto place = static_cast<size_t>(rank);
      std::vector<std::vector<std::string>> all;
      for (const auto& messages : rounds) all.push_back(controls[place]->exchange(messages[place]));
      return all;
    });
    for (const auto& all : got) CHECK((all == rounds));
  }

  TEST_CASE("a rank that has ended is named, and nothing can be agreed on after it") {
    const auto meeting = std::make_shared<Meeting>(3);
    const auto controls = made_controls(3, meeting);
    meeting->leave(1);
    const auto errors = on_ranks(3, [&](int rank) {
      std::vector<std::string> said;
      for (int i = 0; i < 2 && rank != 1; ++i) {
        try {
          controls[static_cast<size_t>(rank)]->exchange("x");
          said.emplace_back("none");
        } catch (const roundpipe::Error& error) {
          said.emplace_back(error.what());
        }
      }
      return said;
    });
    for (const int rank : {0, 2}) {
      const std::vector<std::string>& said = errors[static_cast<size_t>(rank)];
      CHECK(said[0] == roundpipe::concat("[distributed] rank 1 did not answer rank ", rank,
                                         " within 60 s, or has ended (connection closed by peer); look at its own "
                                         "output, and start all nodes again from the last checkpoint"));
      CHECK(said[1] == said[0]);
    }
  }

  TEST_CASE("what differs is said with the same words on every rank") {
    const auto deed = [](Agreement& agreement, int rank) {
      agreement.agree("wraps", {{"the class", "Net"}}, "the same program on every rank");
      agreement.agree("wraps", {{"lr", rank == 1 ? "0.2" : "0.1"}, {"eps", "1e-8"}}, "the same program on every rank");
    };
    for (const std::string& error : errors_of(3, deed))
      CHECK(error ==
            "[distributed] the ranks differ in model 1 (Net): lr: ranks 0 and 2 have 0.1, rank 1 has 0.2; expected the "
            "same program on every rank");
  }

  TEST_CASE("ranks that do something else are named") {
    const auto deed = [](Agreement& agreement, int rank) { agreement.gather(rank == 0 ? "wraps" : "steps", ""); };
    for (const std::string& error : errors_of(2, deed))
      CHECK(
          error ==
          "[distributed] the ranks do not do the same: rank 0 wraps model 1 (Net), rank 1 steps model 1 (Net); "
          "expected each to wrap the same models, make the same optimizers and make the same steps in the same order");
    const auto beside = [](Agreement& agreement, int rank) {
      agreement.gather(rank == 0 ? "calls" : "steps", "", {"calls", "steps"});
    };
    for (const std::string& error : errors_of(2, beside)) CHECK(error == "none");
  }

  TEST_CASE("a message that ends too early is refused") {
    const std::string bytes = Message().add(uint8_t{3}).add("text").bytes();
    MessageReader reader(std::string_view(bytes).substr(0, bytes.size() - 1));
    CHECK(reader.number<uint8_t>() == 3);
    CHECK_THROWS_AS(reader.text(), roundpipe::Error);
  }
}
