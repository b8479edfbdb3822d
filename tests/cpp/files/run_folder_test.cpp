#include <roundpipe/files/run_folder.h>

#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/crc32c.h>
#include <roundpipe/files/damage.h>
#include <roundpipe/files/step_files.h>
#include <roundpipe/files/steps.h>
#include <roundpipe/files/verify.h>

#include "faulty_files.h"

using namespace roundpipe;
using namespace roundpipe::files;
using namespace roundpipe::files::test;

namespace {

using Steps = std::vector<int64_t>;

// Two files that say which save they are of.
void save(RunFolder& run, int64_t step, const std::string& mark = "first", bool replace = false) {
  const auto writer = run.begin(step, {.total_bytes = 100, .replace = replace});
  writer->add_small("mark", mark);
  OutputFile& file = writer->create("data", 4);
  file.write_at(2, "cd", 2);
  file.write_at(0, "ab", 2);
  writer->commit({{"roundpipe", "test"}});
}

std::vector<std::string> names_in(const std::string& folder) { return FileSystem::real().list(folder); }

// What a process does with `call`: 0, or 1 where that throws.
int in_child(const std::function<void()>& call) {
  const pid_t child = forked();
  if (child == 0) {
    int status = 0;
    try {
      call();
    } catch (const std::exception&) {
      status = 1;
    }
    ::_exit(status);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return WEXITSTATUS(status);
}

}  // namespace

TEST_CASE("run folder: what is committed is complete, and nothing else has a step's name") {
  const TemporaryFolder folder;
  RunFolder run(folder / "new/run");
  CHECK(run.notices().empty());
  CHECK_FALSE(run.latest());
  {
    const auto writer = run.begin(7);
    writer->add_small("a", "alpha");
    OutputFile& file = writer->create("b", 3);
    CHECK(run.steps().empty());
    CHECK(latest_step(run.path()) == std::nullopt);
    file.write_at(0, "xyz", 3);
    const Manifest manifest = writer->commit({{"torch", "2.13"}});
    CHECK(manifest.files.size() == 2);
    CHECK(writer->step() == 7);
  }
  CHECK(run.steps() == Steps{7});
  CHECK(names_in(run.path()) == std::vector<std::string>{".lock", "step-7"});
  CHECK(names_in(run.path() + "/step-7") == std::vector<std::string>{"a", "b", "manifest.json"});
  CHECK(contents_of(run.path() + "/step-7/a") == "alpha");
  const Manifest manifest = require_complete(run.path() + "/step-7");
  CHECK(manifest.step == 7);
  CHECK(manifest.writer.at("torch") == "2.13");
  CHECK(verify_step(run.path() + "/step-7").empty());
}

TEST_CASE("run folder: files of other processes belong to the checkpoint, if they are there") {
  const TemporaryFolder folder(kMemory);
  RunFolder run(folder.path());
  {
    const auto writer = run.begin(1);
    writer->add_small("own", "alpha");
    REQUIRE(in_child([&] {
              StepFiles files(writer->folder());
              files.add_small("theirs", "beta");
              files.finish();
              files.sync_names();
            }) == 0);
    const FileRecord theirs{"theirs", 4, crc32c("beta", 4)};
    CHECK(contains(error_of<Error>([&] { writer->adopt({{"theirs", 5, 0}}, "rank 1"); }), "has another size"));
    CHECK(contains(error_of<Error>([&] { writer->adopt({{"other", 4, 0}}, "rank 1"); }),
                   "'other', which rank 1 has written with 4 bytes, is not there"));
    writer->adopt({theirs}, "rank 1");
    const Manifest manifest = writer->commit({}, 2);
    CHECK(manifest.files.size() == 2);
  }
  CHECK(require_complete(run.path() + "/step-1").nodes == 2);
  CHECK(verify_step(run.path() + "/step-1").empty());
  {
    const auto writer = run.begin(2);
    StepFiles(writer->folder()).add_small("theirs", "beta");
  }
  CHECK(names_in(run.path()) == std::vector<std::string>{".lock", "step-1"});
}

TEST_CASE("run folder: a writer that does not commit leaves nothing") {
  const TemporaryFolder folder(kMemory);
  RunFolder run(folder.path());
  {
    const auto writer = run.begin(1);
    writer->add_small("a", "alpha");
    writer->create("unfinished", 100).write_at(0, "x", 1);
    CHECK(contains(error_of<Error>([&] { writer->commit(); }), "'unfinished' is finished with 1 of its 100 bytes"));
  }
  CHECK(names_in(folder.path()) == std::vector<std::string>{".lock"});
  save(run, 1);
  CHECK(run.steps() == Steps{1});
}

TEST_CASE("run folder: bad names, the same step twice, and too little space are refused") {
  const TemporaryFolder folder(kMemory);
  RunFolder run(folder.path());
  const auto writer = run.begin(1);
  writer->create("a", 0);
  for (const std::string& name : std::vector<std::string>{"a", "../b", "manifest.json", ""}) {
    CHECK_THROWS_AS(writer->create(name, 0), std::invalid_argument);
  }
  CHECK_THROWS_AS(writer->create("b", -1), std::invalid_argument);
  writer->create("b", 0);
  CHECK(contains(error_of<Error>([&] { run.begin(1); }), "step 1 is being written"));
  CHECK_THROWS_AS(run.begin(-1), std::invalid_argument);
  CHECK(contains(error_of<Error>([&] { run.begin(2, {.total_bytes = 1LL << 60}); }), "step 2 takes 1048576.00 TiB"));
  writer->commit();
  CHECK(contains(error_of<Error>([&] { run.begin(1); }), "is there already"));
}

TEST_CASE("run folder: threads create and write files side by side") {
  const TemporaryFolder folder(kMemory);
  RunFolder run(folder.path());
  const auto writer = run.begin(3);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int file = 0; file < 10; ++file) {
        const std::string name = std::to_string(thread) + "-" + std::to_string(file);
        writer->add_small(name, std::string(1000, 'x') + name);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(writer->commit().files.size() == 40);
  CHECK(verify_step(folder / "step-3").empty());
}

TEST_CASE("run folder: a step is replaced when asked, whether or not the disk can exchange names") {
  for (const bool can_exchange : {true, false}) {
    const TemporaryFolder folder(kMemory);
    FaultyFiles files;
    files.fault = [=](Call call, const std::string&, int) {
      return call == Call::kExchange && !can_exchange ? EINVAL : 0;
    };
    RunFolder run(folder.path(), files);
    save(run, 5, "first");
    save(run, 5, "second", true);
    CHECK(contents_of(folder / "step-5/mark") == "second");
    CHECK(names_in(folder.path()) == std::vector<std::string>{".lock", "step-5"});
    save(run, 6, "fresh", true);
    CHECK(run.steps() == Steps{5, 6});
  }
}

TEST_CASE("run folder: one writer at a time") {
  const TemporaryFolder folder(kMemory);
  auto run = std::make_unique<RunFolder>(folder.path());
  const std::string by_other_path = folder.path() + "/../" + std::filesystem::path(folder.path()).filename().string();
  const std::string second = error_of<Error>([&] { RunFolder again(by_other_path); });
  CHECK(contains(second, "in use by this process, which has opened it before"));
  CHECK(in_child([&] { RunFolder again(folder.path()); }) == 1);
  auto writer = run->begin(1);
  run.reset();
  CHECK_THROWS_AS(RunFolder again(folder.path()), Error);  // the writer holds the lock
  writer.reset();
  RunFolder again(folder.path());
  // Another process's name is in the message.
  std::array<int, 2> pipes{};
  REQUIRE(::pipe(pipes.data()) == 0);
  const TemporaryFolder other(kMemory);
  const pid_t child = forked();
  if (child == 0) {
    RunFolder held(other.path());
    char letter = 'x';
    if (::write(pipes[1], &letter, 1) != 1) ::_exit(1);
    ::pause();
    ::_exit(0);
  }
  char letter = 0;
  REQUIRE(::read(pipes[0], &letter, 1) == 1);
  CHECK(contains(error_of<Error>([&] { RunFolder refused(other.path()); }),
                 "in use by process " + std::to_string(child)));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  RunFolder free(other.path());
  ::close(pipes[0]);
  ::close(pipes[1]);
}

TEST_CASE("run folder: a child neither has the lock, nor keeps it, nor removes what its parent writes") {
  const TemporaryFolder folder(kMemory);
  auto run = std::make_unique<RunFolder>(folder.path());
  auto writer = run->begin(1);
  writer->add_small("a", "alpha");
  CHECK(in_child([&] {
          CHECK_THROWS_AS(run->begin(2), Error);
          CHECK_THROWS_AS(writer->create("b", 1), Error);
          CHECK_THROWS_AS(writer->commit(), Error);
          CHECK_THROWS_AS(run->prune({}), Error);
          writer.reset();
          run.reset();
        }) == 0);
  std::array<int, 2> pipes{};
  REQUIRE(::pipe(pipes.data()) == 0);
  const pid_t lasting = forked();  // as a worker of a data loader
  if (lasting == 0) {
    char letter = 0;
    ::close(pipes[1]);
    ::_exit(::read(pipes[0], &letter, 1) == 0 ? 0 : 1);
  }
  writer->commit();
  writer.reset();
  run.reset();
  CHECK(RunFolder(folder.path()).steps() == Steps{1});
  ::close(pipes[1]);
  ::waitpid(lasting, nullptr, 0);
  ::close(pipes[0]);
}

TEST_CASE("run folder: what killed processes have left is removed or restored") {
  const TemporaryFolder folder(kMemory);
  FileSystem& files = FileSystem::real();
  {
    RunFolder run(folder.path());
    save(run, 10);
    save(run, 20);
    save(run, 30);
  }
  files.make_folder(folder / ".step-40.partial-99-0");
  write_file(folder / ".step-40.partial-99-0/data", "half");
  files.make_folder(folder / ".step-5.removed-99-1");
  files.rename(folder / "step-20", folder / ".step-20.replaced-99-2");  // killed between two renames
  std::filesystem::copy(folder / "step-30", folder / ".step-30.replaced-99-3",
                        std::filesystem::copy_options::recursive);
  files.make_folder(folder / ".other");
  files.make_folder(folder / "step-x");
  CHECK(complete_steps(folder.path()) == Steps{10, 30});
  const RunFolder run(folder.path());
  CHECK(run.steps() == Steps{10, 20, 30});
  CHECK(run.notices().size() == 4);
  CHECK(names_in(folder.path()) ==
        std::vector<std::string>{".lock", ".other", "step-10", "step-20", "step-30", "step-x"});
}

TEST_CASE("run folder: only complete checkpoints are found, and the others are explained") {
  const TemporaryFolder folder(kMemory);
  {
    RunFolder run(folder.path());
    for (const int64_t step : {1, 2, 3, 4, 5, 6, 7}) save(run, step);
  }
  std::filesystem::remove(folder / "step-7/manifest.json");
  std::filesystem::remove(folder / "step-6/data");
  write_file(folder / "step-5/data", "abc");
  std::filesystem::rename(folder / "step-4", folder / "step-40");
  std::filesystem::remove_all(folder / "step-3");
  std::filesystem::create_directory_symlink(folder / "step-2", folder / "step-3");
  std::filesystem::remove(folder / "step-2/data");
  std::filesystem::create_symlink(folder / "step-1/data", folder / "step-2/data");
  write_file(folder / "step-9", "a file");
  write_file(folder / "step-007", "");
  std::vector<std::string> problems;
  for (const FoundStep& found : find_steps(folder.path()))
    problems.push_back(std::to_string(found.step) + ": " + found.problem);
  REQUIRE(problems.size() == 8);
  CHECK(problems[0] == "1: ");
  CHECK(contains(problems[1], "2: [" + folder.path() + "/step-2] the file 'data' of 4 bytes is missing or no regular"));
  CHECK(contains(problems[2], "links are not followed"));
  CHECK(contains(problems[3], "has 3 bytes, expected 4"));
  CHECK(contains(problems[4], "'data' of 4 bytes is missing"));
  CHECK(contains(problems[5], "no manifest.json"));
  CHECK(contains(problems[6], "9: "));
  CHECK(contains(problems[7], "40: [" + folder.path() + "/step-40] the manifest is of step 4"));
  CHECK(latest_step(folder.path()) == 1);
  CHECK(find_steps(folder / "none").empty());
  CHECK_THROWS_AS(find_steps(folder / "step-9"), Error);
  RunFolder run(folder.path());
  CHECK(run.prune({.keep_last = 1}).removed.empty());
}

TEST_CASE("run folder: retention keeps the newest and every n-th, and never none") {
  const TemporaryFolder folder(kMemory);
  RunFolder run(folder.path());
  CHECK(run.prune({}).removed.empty());
  for (int64_t step = 1; step <= 10; ++step) save(run, step);
  CHECK(run.prune({.keep_last = 3, .keep_every = 4}).removed == Steps{1, 2, 3, 5, 6, 7});
  CHECK(run.steps() == Steps{4, 8, 9, 10});
  CHECK(run.prune({}).removed == Steps{4, 8, 9});
  CHECK(run.prune({}).removed.empty());
  CHECK(names_in(folder.path()) == std::vector<std::string>{".lock", "step-10"});
  CHECK_THROWS_AS(run.prune({.keep_last = 0}), std::invalid_argument);
  CHECK_THROWS_AS(run.prune({.keep_every = -1}), std::invalid_argument);
}

TEST_CASE("run folder: a training that went back keeps what it saves, whatever lies beyond") {
  const TemporaryFolder folder(kMemory);
  RunFolder run(folder.path());
  for (const int64_t step : {4, 8, 12, 16}) save(run, step);
  // As from 4: 12 and 16 were passed over.
  CHECK(run.prune({.keep_last = 1, .newest = 8}).removed == Steps{4});
  CHECK(run.steps() == Steps{8, 12, 16});
  CHECK(contains(error_of<Error>([&] { run.begin(12); }), "is there already"));
  note_damaged(folder / "step-12");
  save(run, 12, "again");
  CHECK(contents_of(folder / "step-12/mark") == "again");
  CHECK_FALSE(is_known_damaged(folder / "step-12"));
  std::filesystem::remove(folder / "step-16/data");
  save(run, 16, "again");
  CHECK(contents_of(folder / "step-16/mark") == "again");
}

TEST_CASE("run folder: what cannot be removed is told, and is no error") {
  for (const Call refused : {Call::kRename, Call::kRemove, Call::kList}) {
    const TemporaryFolder folder(kMemory);
    FaultyFiles files;
    RunFolder run(folder.path(), files);
    for (const int64_t step : {1, 2, 3}) save(run, step);
    files.fault = [=](Call call, const std::string&, int) { return call == refused ? EPERM : 0; };
    const Pruned pruned = run.prune({.keep_last = 2});
    files.fault = nullptr;
    REQUIRE(pruned.notices.size() == 1);
    CHECK(contains(pruned.notices[0], "[checkpoint] cannot "));
    CHECK(pruned.removed == (refused == Call::kRename || refused == Call::kList ? Steps{} : Steps{1}));
    CHECK(latest_step(folder.path()) == 3);
  }
}

TEST_CASE("run folder: a save says whether the checkpoint is there") {
  const TemporaryFolder folder(kMemory);
  FaultyFiles files;
  RunFolder run(folder.path(), files);
  for (const bool of_file : {true, false}) {
    const auto writer = run.begin(of_file ? 1 : 2);
    writer->add_small("a", "alpha");
    // The last sync is that of the run's folder, after the checkpoint has its name.
    files.fault = [&](Call call, const std::string& path, int) {
      return call == Call::kSync && (of_file || path == folder.path()) ? EIO : 0;
    };
    const std::string error = error_of<Error>([&] { writer->commit(); });
    files.fault = nullptr;
    CHECK(writer->placed() == !of_file);
    CHECK(contains(error, "is complete, but may be lost") == !of_file);
    CHECK(contains(failed_save_notice(2, error, writer->placed()), "was not saved") == of_file);
  }
  CHECK(run.steps() == Steps{2});
  CHECK_FALSE(contains(failed_save_notice(2, "lost", std::nullopt), "was not saved"));
}

TEST_CASE("run folder: names of steps") {
  CHECK(step_name(120) == "step-120");
  CHECK(step_of("step-0") == 0);
  CHECK(step_of("step-9223372036854775807") == 9223372036854775807LL);
  for (const char* name :
       {"step-", "step-01", "step--1", "step-1x", "Step-1", "step-9223372036854775808", "step-+1", " step-1"}) {
    CHECK_FALSE(step_of(name));
  }
  CHECK_THROWS_AS(step_name(-1), std::invalid_argument);
}

// -- each system call fails once, or is the last ----------------------------------------------------------------------

namespace {

// Checkpoints of steps 1 and 2 are there. Then step 2 is replaced or step 3 is saved, with retention.
struct Save {
  bool replace = false;
  bool can_exchange = true;  // names, in one step
  int64_t step() const { return replace ? 2 : 3; }
};
const std::vector<Save> kSaves = {{false, true}, {true, true}, {true, false}};

void prepare(const std::string& folder) {
  RunFolder run(folder);
  save(run, 1);
  save(run, 2);
}

// Returns how it ended: "saved", "pruned", or a message. System calls of it are numbered from 0.
std::string save_and_prune(const std::string& folder, const Save& what, const std::function<int(int number)>& fault) {
  FaultyFiles files;
  RunFolder run(folder, files);
  std::string end;
  files.calls = 0;
  files.fault = [&](Call call, const std::string&, int number) {
    const int error = fault(number);
    return error == 0 && call == Call::kExchange && !what.can_exchange ? EINVAL : error;
  };
  try {
    save(run, what.step(), "second", what.replace);
    end = "saved";
    run.prune({.keep_last = 2});
    end = "pruned";
  } catch (const Error& failed) {
    if (end.empty()) end = failed.what();
  }
  files.fault = nullptr;
  return end;
}

void check_what_is_there(const std::string& folder, const Save& what, bool saved) {
  // Another program looks before anybody has cleaned up, and then the next run opens the folder.
  if (what.can_exchange || !what.replace) CHECK(complete_steps(folder).back() >= 2);
  const RunFolder run(folder);
  const Steps steps = run.steps();
  REQUIRE(steps.size() >= 1);
  CHECK(steps.back() >= 2);
  if (saved) CHECK(contents_of(join(folder, step_name(what.step()) + "/mark")) == "second");
  for (const int64_t step : steps) CHECK(verify_step(join(folder, step_name(step))).empty());
  for (const std::string& name : names_in(folder)) CHECK((name == ".lock" || step_of(name).has_value()));
  CHECK(find_steps(folder).size() == steps.size());
}

}  // namespace

TEST_CASE("run folder: whichever system call of a save fails, the last complete checkpoint stays") {
  for (const int error : {EIO, ENOSPC}) {
    for (const bool every_one_after : {false, true}) {
      for (const Save& what : kSaves) {
        bool reached = true;
        int failing = 0;
        for (; reached; ++failing) {
          const TemporaryFolder folder(kMemory);
          prepare(folder.path());
          reached = false;
          const std::string end = save_and_prune(folder.path(), what, [&](int number) {
            if (number != failing && !(every_one_after && number > failing)) return 0;
            reached = true;
            return error;
          });
          CAPTURE(failing);
          CAPTURE(end);
          const bool saved = end == "saved" || end == "pruned";
          CHECK((saved || contains(end, "[checkpoint] cannot ")));
          check_what_is_there(folder.path(), what, saved);
        }
        CHECK(failing > 25);
      }
    }
  }
}

TEST_CASE("run folder: a process that is killed at any system call of a save leaves the last complete checkpoint") {
  for (const Save& what : kSaves) {
    int last = 0;
    for (bool killed = true; killed; ++last) {
      const TemporaryFolder folder(kMemory);
      prepare(folder.path());
      const int status = in_child([&] {
        const std::string end = save_and_prune(folder.path(), what, [&](int number) {
          if (number == last) ::_exit(9);
          return 0;
        });
        if (end != "pruned") throw Error(end);
      });
      killed = status == 9;
      CAPTURE(last);
      CHECK((killed || status == 0));
      check_what_is_there(folder.path(), what, !killed);
    }
    CHECK(last > 25);
  }
}

TEST_CASE("run folder: everything is on the disk before the name, and the name before anything is removed") {
  for (const Save& what : kSaves) {
    const TemporaryFolder folder(kMemory);
    prepare(folder.path());
    FaultyFiles files;
    std::vector<std::string> calls;  // "write mark"
    files.fault = [&](Call call, const std::string& path, int) {
      const std::map<Call, std::string> names = {{Call::kWrite, "write "},
                                                 {Call::kSync, "sync "},
                                                 {Call::kRemove, "remove "},
                                                 {Call::kRename, "rename "},
                                                 {Call::kExchange, "exchange "}};
      const std::filesystem::path of(path);
      const bool hidden = of.filename().string().starts_with(".");
      const std::string name = hidden ? "aside" : path == folder.path() ? "run" : of.filename().string();
      if (names.contains(call)) calls.push_back(names.at(call) + name);
      return call == Call::kExchange && !what.can_exchange ? EINVAL : 0;
    };
    RunFolder run(folder.path(), files);
    calls.clear();
    save(run, what.step(), "second", what.replace);
    std::vector<std::string> expected = {"write mark", "sync mark",           "write data",         "write data",
                                         "sync data",  "write manifest.json", "sync manifest.json", "sync aside"};
    const std::vector<std::string> rest =
        !what.replace       ? std::vector<std::string>{"rename aside"}
        : what.can_exchange ? std::vector<std::string>{"exchange aside"}
                            : std::vector<std::string>{"exchange aside", "rename step-2", "rename aside"};
    expected.insert(expected.end(), rest.begin(), rest.end());
    expected.push_back("sync run");
    if (what.replace)
      expected.insert(expected.end(), {"remove data", "remove manifest.json", "remove mark", "remove aside"});
    CHECK(calls == expected);
  }
}
