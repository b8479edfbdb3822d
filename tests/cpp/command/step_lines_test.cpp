#include <roundpipe/command/step_lines.h>

#include <cerrno>
#include <fstream>

#include <doctest/doctest.h>

#include "faulty_files.h"

using namespace roundpipe;
using namespace roundpipe::files::test;  // NOLINT

namespace {

using Texts = std::vector<std::string>;

std::string line(int64_t step) { return concat(R"({"step":)", step, "}"); }

}  // namespace

TEST_CASE("step lines: those of steps that are made again are removed") {
  const TemporaryFolder folder(kMemory);
  const std::string path = folder / "metrics.jsonl";
  {
    StepLines lines(path, 0);
    for (int64_t step = 0; step < 4; ++step) lines.add(line(step));
    CHECK(contents_of(path) == line(0) + "\n" + line(1) + "\n" + line(2) + "\n" + line(3) + "\n");
  }
  std::ofstream(path, std::ios::app) << R"({"step": 1, "lo)";
  {
    StepLines lines(path, 2);
    CHECK(lines.lines() == Texts{line(0), line(1), line(2)});
    lines.add(line(7));
    CHECK(lines.lines() == Texts{line(0), line(1), line(2), line(7)});
  }
  CHECK(contents_of(path) == line(0) + "\n" + line(1) + "\n" + line(2) + "\n" + line(7) + "\n");
  StepLines(path, 0);
  CHECK(contents_of(path).empty());
}

TEST_CASE("step lines: a full disk does not end a training") {
  const TemporaryFolder folder(kMemory);
  const std::string path = folder / "metrics.jsonl";
  FaultyFiles files;
  bool is_full = false;
  files.most_at_once = 5;
  files.fault = [&](files::Call call, const std::string&, int number) {
    return is_full && call == files::Call::kWrite && number % 2 == 1 ? ENOSPC : 0;
  };
  Texts told;
  StepLines lines(path, 0, [&](const std::string& text) { told.push_back(text); }, files);
  lines.add(line(1));
  is_full = true;
  lines.add(line(2));
  lines.add(line(3));
  REQUIRE(told.size() == 1);
  CHECK(contains(told[0], "No space left on device"));
  CHECK(contains(told[0], "training goes on, and its lines are written when there is room"));
  is_full = false;
  lines.add(line(4));
  CHECK(contents_of(path) == line(1) + "\n" + line(2) + "\n" + line(3) + "\n" + line(4) + "\n");
}

TEST_CASE("step lines: a folder that is not there") { CHECK_THROWS_AS(StepLines("/nowhere/metrics.jsonl", 0), Error); }
