#include <roundpipe/files/fall_back.h>

#include <filesystem>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/damage.h>
#include <roundpipe/files/run_folder.h>

#include "faulty_files.h"

using namespace roundpipe;
using namespace roundpipe::files;
using namespace roundpipe::files::test;

namespace fall_back_test {

void save_steps(const std::string& folder, const std::vector<int64_t>& steps) {
  RunFolder run(folder);
  for (const int64_t step : steps) {
    const auto writer = run.begin(step);
    writer->add_small("data", "0123");
    writer->commit();
  }
}

struct Told {
  std::vector<std::string> lines;
  FallBack::Tell tell() {
    return [this](const std::string& line) { lines.push_back(line); };
  }
};

TEST_CASE("fall back: the newest checkpoint is taken, and nothing is told") {
  const TemporaryFolder folder(kMemory);
  save_steps(folder.path(), {1, 5});
  for (const std::string& given : {folder.path(), folder / "step-5", folder / "step-5/"}) {
    Told told;
    CHECK(std::filesystem::equivalent(FallBack(given, told.tell()).next(), folder / "step-5"));
    CHECK(told.lines.empty());
  }
}

TEST_CASE("fall back: each checkpoint that is passed over is told, with the steps that are lost") {
  const TemporaryFolder folder(kMemory);
  save_steps(folder.path(), {1, 5, 6, 9});
  std::filesystem::remove(folder / "step-9/manifest.json");
  write_file(folder / "step-6/data", "cut");
  Told told;
  FallBack fall_back(folder.path(), told.tell());
  CHECK(fall_back.next() == folder / "step-5");
  REQUIRE(told.lines.size() == 2);
  CHECK(told.lines[0].starts_with("[load_checkpoint] going back from step 9 to step 5, which loses 4 steps: ["));
  CHECK(contains(told.lines[0], "step-9] has no manifest.json"));
  CHECK(contains(told.lines[1], "from step 6 to step 5, which loses 4 steps: "));
  CHECK(contains(told.lines[1], "step-6] the file 'data' has 3 bytes"));
  // What only the load finds.
  fall_back.damaged("[checkpoint] step-5/data is damaged");
  CHECK(fall_back.next() == folder / "step-1");
  REQUIRE(told.lines.size() == 3);
  CHECK(told.lines[2] ==
        "[load_checkpoint] going back from step 5 to step 1, which loses 8 steps: [checkpoint] step-5/data is damaged");
  for (const int64_t step : {5, 6, 9}) CHECK(is_known_damaged(folder / step_name(step)));
  CHECK_FALSE(is_known_damaged(folder / "step-1"));
  fall_back.damaged("[checkpoint] step-1/data is damaged");
  CHECK(contains(error_of<Error>([&] { fall_back.next(); }),
                 "has no checkpoint that is whole, expected step-N with all its files; the newest one: ["));
  CHECK(told.lines.size() == 3);
}

TEST_CASE("fall back: one checkpoint is taken as it is, or not at all") {
  const TemporaryFolder folder(kMemory);
  save_steps(folder.path(), {1, 2});
  std::filesystem::rename(folder / "step-1", folder / "best");
  Told told;
  CHECK(FallBack(folder / "best", told.tell()).next() == folder / "best");
  std::filesystem::remove(folder / "step-2/manifest.json");
  FallBack damaged(folder / "step-2", told.tell());
  CHECK(contains(error_of<Error>([&] { damaged.next(); }), "step-2] has no manifest.json"));
  FallBack nothing(folder / "none", told.tell());
  CHECK(error_of<Error>([&] {
          nothing.next();
        }).ends_with("none is not there, expected a checkpoint or the folder of a run"));
  std::filesystem::create_directory(folder / "none");
  FallBack empty(folder / "none", told.tell());
  CHECK(error_of<Error>([&] { empty.next(); })
            .ends_with("none has no checkpoint that is whole, expected step-N with "
                       "all its files"));
  CHECK(told.lines.empty());
}

TEST_CASE("fall back: a lack of descriptors is no damage") {
  const TemporaryFolder folder(kMemory);
  save_steps(folder.path(), {1, 2});
  for (const int error : {EMFILE, ENOMEM, EIO}) {
    FaultyFiles files;
    Told told;
    FallBack fall_back(folder.path(), told.tell(), files);
    files.fault = [&](Call call, const std::string& path, int) {
      return call == Call::kOpen && contains(path, "step-2") ? error : 0;
    };
    if (error == EIO) {
      CHECK(fall_back.next() == folder / "step-1");
    } else {
      CHECK_THROWS_AS(fall_back.next(), ProcessLimit);
    }
    CHECK(told.lines.size() == (error == EIO ? 1 : 0));
  }
}

TEST_CASE("fall back: what is thrown about a file is damage, and other errors are not") {
  const auto thrown_by = [](auto error) {
    return error_of<DamagedCheckpoint>([&] {
      try {
        reading("run/step-1/data", [&] { throw error; });
      } catch (const DamagedCheckpoint&) {
        throw;
      } catch (const std::exception&) {
      }
    });
  };
  CHECK(thrown_by(Error("[run/step-1/data] is cut")) == "[run/step-1/data] is cut");
  CHECK(thrown_by(Error("it is cut")) == "[checkpoint] run/step-1/data: it is cut");
  CHECK(thrown_by(Cancelled("interrupted")) == "nothing was thrown");
  CHECK(thrown_by(ProcessLimit("no memory")) == "nothing was thrown");
  CHECK(thrown_by(std::invalid_argument("[load] another shape")) == "nothing was thrown");
}

}  // namespace fall_back_test
