#include <roundpipe/runtime/call/verdict.h>

#include <doctest/doctest.h>

using namespace roundpipe::runtime;

namespace verdict_test {

// A run on a device whose results are told apart by one number.
CheckedRun run(size_t device, uint32_t bits) { return {device, {{{JobResult::Kind::kValues, 1, 0, 0}, bits}}}; }

const std::vector<CheckedDevice> kDevices = {{"a"}, {"b"}, {"c"}};

std::vector<size_t> wrong(const std::vector<CheckedRun>& runs) { return judge(kDevices, runs).wrong; }

TEST_SUITE("verdict") {
  TEST_CASE("runs agree if they have the same results with the same bits") {
    CHECK(agree({run(0, 1), run(1, 1)}));
    CHECK_FALSE(agree({run(0, 1), run(1, 2)}));
    CheckedRun more = run(1, 1);
    more.results[{JobResult::Kind::kLosses, 2, 0, 0}] = 1;
    CHECK_FALSE(agree({run(0, 1), more}));
  }

  TEST_CASE("a device is wrong that repeats other bits than most") {
    CHECK(wrong({run(0, 7), run(1, 1), run(0, 7), run(1, 1), run(2, 1)}) == std::vector<size_t>{0});
    CHECK(wrong({run(0, 1), run(1, 7), run(0, 1), run(1, 7), run(2, 1)}) == std::vector<size_t>{1});
  }

  TEST_CASE("a device is wrong that does not repeat its bits where others do") {
    CHECK(wrong({run(0, 7), run(1, 1), run(0, 8), run(1, 1)}) == std::vector<size_t>{0});
    CHECK(wrong({run(0, 1), run(1, 7), run(0, 1), run(1, 1), run(2, 1)}) == std::vector<size_t>{1});
    // Also where a third device is of a kind that rounds otherwise.
    CHECK(wrong({run(0, 7), run(1, 1), run(0, 8), run(1, 1), run(2, 3)}) == std::vector<size_t>{0});
  }

  TEST_CASE("nobody is accused where the runs do not tell") {
    for (const std::vector<CheckedRun>& runs : {
             std::vector<CheckedRun>{run(0, 1), run(1, 2)},
             {run(0, 1), run(1, 2), run(0, 1), run(1, 2)},
             {run(0, 1), run(1, 2), run(0, 1), run(1, 2), run(2, 3)},
         }) {
      CHECK(wrong(runs).empty());
      CHECK(judge(kDevices, runs).reason.find("repeats its own bits") != std::string::npos);
    }
    for (const std::vector<CheckedRun>& runs : {
             std::vector<CheckedRun>{run(0, 1), run(0, 2)},
             {run(0, 1), run(1, 2), run(0, 3), run(1, 4), run(2, 5)},
         }) {
      CHECK(wrong(runs).empty());
      CHECK(judge(kDevices, runs).reason.find("deterministic") != std::string::npos);
    }
  }

  TEST_CASE("a device is wrong that changes what is copied") {
    std::vector<CheckedDevice> devices = kDevices;
    devices[1].changes_copies = true;
    CHECK(judge(devices, {run(0, 1), run(1, 2), run(0, 1), run(1, 2)}).wrong == std::vector<size_t>{1});
  }
}

}  // namespace verdict_test
