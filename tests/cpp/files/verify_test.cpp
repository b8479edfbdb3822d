#include <roundpipe/files/verify.h>

#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/run_folder.h>

#include "faulty_files.h"

using namespace roundpipe;
using namespace roundpipe::files;
using namespace roundpipe::files::test;

namespace {

// step-1 with a file of two and a half pieces, a small one and an empty one
std::string saved_step(const std::string& folder) {
  RunFolder run(folder);
  const auto writer = run.begin(1);
  const std::string large(40 << 20, 'x');
  OutputFile& file = writer->create("large", static_cast<int64_t>(large.size()));
  file.write_at(0, large.data(), file.bytes());
  writer->add_small("small", "0123456789");
  writer->add_small("none", "");
  writer->commit();
  return join(folder, "step-1");
}

void flip_bit(const std::string& path, int64_t at) {
  File file = FileSystem::real().open_to_update(path);
  char letter = 0;
  file.read(at, &letter, 1);
  letter = static_cast<char>(letter ^ 4);
  file.write(at, &letter, 1);
}

}  // namespace

TEST_CASE("verify: a flipped bit in any file is found, and the file named") {
  const TemporaryFolder folder;
  const std::string step = saved_step(folder.path());
  CHECK(verify_step(step).empty());
  CHECK(verify_step(step, {.threads = 1}).empty());
  write_file(step + "/extra", "nobody's");
  CHECK(verify_step(step).empty());
  for (const int64_t at : {0, 16 << 20, (40 << 20) - 1}) {
    flip_bit(step + "/large", at);
    const std::vector<FileProblem> problems = verify_step(step);
    REQUIRE(problems.size() == 1);
    CHECK(problems[0].file == "large");
    CHECK(contains(problems[0].problem, "its checksum is"));
    flip_bit(step + "/large", at);
  }
  flip_bit(step + "/small", 9);
  std::filesystem::resize_file(step + "/large", 1 << 20);
  std::filesystem::remove(step + "/none");
  std::vector<std::string> problems;
  for (const FileProblem& found : verify_step(step)) problems.push_back(found.file + ": " + found.problem);
  REQUIRE(problems.size() == 3);
  CHECK(problems[0] == "large: it has 1048576 bytes, expected 41943040");
  CHECK(problems[1] == "none: it is missing");
  CHECK(contains(problems[2], "small: its checksum is"));
  flip_bit(step + "/manifest.json", 40);
  REQUIRE(verify_step(step).size() == 1);
  CHECK(verify_step(step)[0].file == "manifest.json");
}

TEST_CASE("verify: tells how far it is, ends when asked, and counts a disk that does not read as a problem") {
  const TemporaryFolder folder;
  const std::string step = saved_step(folder.path());
  std::vector<int64_t> done;
  verify_step(step, {.threads = 2, .progress = [&](int64_t done_bytes, int64_t total_bytes) {
                       CHECK(total_bytes == (40 << 20) + 10);
                       done.push_back(done_bytes);
                     }});
  CHECK(done.size() >= 2);
  CHECK(done.front() == 0);
  CHECK(done.back() == (40 << 20) + 10);
  CHECK(std::is_sorted(done.begin(), done.end()));
  for (const int64_t until : {int64_t{0}, int64_t{1}}) {
    CHECK_THROWS_AS(verify_step(step, {.progress =
                                           [&](int64_t done_bytes, int64_t) {
                                             if (done_bytes >= until) throw std::domain_error("interrupted");
                                           }}),
                    std::domain_error);
  }
  FaultyFiles files;
  files.fault = [](Call call, const std::string& path, int) {
    return call == Call::kRead && path.ends_with("small") ? EIO : 0;
  };
  const std::vector<FileProblem> problems = verify_step(step, {}, files);
  REQUIRE(problems.size() == 1);
  CHECK(contains(problems[0].problem, "Input/output error"));
  CHECK_THROWS_AS(verify_step(step, {.threads = 0}), std::invalid_argument);
  CHECK(verify_step(folder / "none")[0].file == "manifest.json");
}
