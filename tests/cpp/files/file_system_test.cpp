#include <roundpipe/files/file_system.h>

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>

#include "faulty_files.h"

using namespace roundpipe;
using namespace roundpipe::files;
using namespace roundpipe::files::test;

TEST_CASE("files: what is written is read, also in short parts and with interrupts") {
  const TemporaryFolder folder;
  FaultyFiles files;
  files.most_at_once = 7;
  files.fault = [](Call call, const std::string&, int number) {
    return (call == Call::kWrite || call == Call::kRead || call == Call::kSync) && number % 3 == 0 ? EINTR : 0;
  };
  {
    File file = files.create(folder / "a");
    file.write(5, "fghij0123456789", 15);
    file.write(0, "abcde", 5);
    file.sync();
    CHECK(file.size() == 20);
    file.close();
  }
  CHECK(files.read_small(folder / "a", 20) == "abcdefghij0123456789");
  CHECK(contains(error_of<Error>([&] { files.read_small(folder / "a", 19); }), "20 B, expected at most 19 B"));
  File file = files.open_to_read(folder / "a");
  std::string read(4, ' ');
  file.read(8, read.data(), 4);
  CHECK(read == "ij01");
  CHECK(contains(error_of<Error>([&] { file.read(18, read.data(), 4); }), "ends at byte 20, expected 2 bytes more"));
}

TEST_CASE("files: every failure names the path, the system's words and what to do") {
  const TemporaryFolder folder;
  FaultyFiles files;
  write_file(folder / "there", "x");
  const auto message = [&](Call failing, int error, const std::function<void()>& call) {
    files.fault = [=](Call made, const std::string&, int) { return made == failing ? error : 0; };
    const std::string text = error_of<Error>(call);
    files.fault = nullptr;
    return text;
  };
  const std::string there = folder / "there";
  File file = files.open_to_update(there);
  char letter = 0;
  const std::vector<std::pair<Call, std::function<void()>>> cases = {
      {Call::kOpen, [&] { files.open_to_read(there); }},
      {Call::kClose, [&] { files.open_to_read(there).close(); }},
      {Call::kWrite, [&] { file.write(0, "y", 1); }},
      {Call::kReserve, [&] { file.reserve(1); }},
      {Call::kOpen, [&] { files.open_direct(there); }},
      {Call::kRead, [&] { file.read(0, &letter, 1); }},
      {Call::kSync, [&] { file.sync(); }},
      {Call::kSync, [&] { files.sync_folder(folder.path()); }},
      {Call::kTruncate, [&] { file.truncate(0); }},
      {Call::kStatus, [&] { files.look(there); }},
      {Call::kStatus, [&] { file.size(); }},
      {Call::kRename, [&] { files.rename(there, folder / "other"); }},
      {Call::kExchange, [&] { files.exchange(there, there); }},
      {Call::kMakeFolder, [&] { files.make_folder(folder / "new"); }},
      {Call::kRemove, [&] { files.remove_file(there); }},
      {Call::kList, [&] { files.list(folder.path()); }},
      {Call::kFreeSpace, [&] { files.free_bytes(folder.path()); }},
      {Call::kLock, [&] { files.try_lock(file); }}};
  for (const auto& [failing, call] : cases) {
    const std::string text = message(failing, EIO, call);
    CAPTURE(text);
    CHECK(contains(text, folder.path()));
    CHECK(contains(text, "Input/output error; the disk may be failing"));
  }
  CHECK(contains(message(Call::kWrite, ENOSPC, cases[2].second), "No space left on device; free some space"));
  CHECK(contains(message(Call::kMakeFolder, EROFS, cases[13].second), "choose a folder that this user can"));
  CHECK(contents_of(there) == "x");
  CHECK(contains(error_of<Error>([&] { files.create(there); }), "File exists"));
}

TEST_CASE("files: links are seen and not followed, pipes are refused, trees are removed") {
  const TemporaryFolder folder;
  FileSystem& files = FileSystem::real();
  files.make_folders(folder / "a/b/c");
  files.make_folders(folder / "a/b/c");
  write_file(folder / "outside", "kept");
  write_file(folder / "a/b/file", "12345");
  REQUIRE(::symlink((folder / "outside").c_str(), (folder / "a/link").c_str()) == 0);
  REQUIRE(::mkfifo((folder / "pipe").c_str(), 0600) == 0);
  CHECK(files.look(folder / "a/link").kind == EntryKind::kLink);
  CHECK(files.look(folder / "a/b").kind == EntryKind::kFolder);
  CHECK(files.look(folder / "a/b/file").bytes == 5);
  CHECK(files.look(folder / "pipe").kind == EntryKind::kOther);
  CHECK(files.look(folder / "outside/none").kind == EntryKind::kNothing);
  CHECK(files.list(folder.path()) == std::vector<std::string>{"a", "outside", "pipe"});
  CHECK(files.read_small(folder / "a/link", 10) == "kept");
  CHECK(contains(error_of<Error>([&] { files.open_to_read(folder / "pipe"); }), "not a regular file"));
  CHECK(contains(error_of<Error>([&] { files.open_to_read(folder / "a"); }), "not a regular file"));
  files.remove_tree(folder / "a");
  files.remove_tree(folder / "a");
  CHECK(files.list(folder.path()) == std::vector<std::string>{"outside", "pipe"});
  CHECK(contents_of(folder / "outside") == "kept");
  CHECK(files.free_bytes(folder.path()) > 0);
}

TEST_CASE("files: a lock is this process's, and a child does not inherit it") {
  const TemporaryFolder folder;
  FileSystem& files = FileSystem::real();
  File file = files.open_to_update(folder / "lock");
  CHECK(files.try_lock(file));
  const pid_t child = forked();
  if (child == 0) {
    File again = files.open_to_update(folder / "lock");
    ::_exit(files.try_lock(again) ? 1 : 0);
  }
  int status = -1;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(status == 0);
  File second = files.open_to_update(folder / "lock");
  CHECK_FALSE(files.try_lock(second));
  file.close();
  CHECK(files.try_lock(second));
}

TEST_CASE("files: paths") {
  CHECK(join("a", "b") == "a/b");
  CHECK(join("/", "b") == "/b");
  CHECK(parent_of("a/b/") == "a");
  CHECK(parent_of("/a") == "/");
  CHECK(parent_of("/") == "/");
  CHECK(parent_of("a") == ".");
}
