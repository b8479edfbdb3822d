#include <roundpipe/files/output_file.h>

#include <algorithm>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/core/error.h>
#include <roundpipe/files/crc32c.h>

#include "faulty_files.h"

using namespace roundpipe;
using namespace roundpipe::files;
using namespace roundpipe::files::test;

namespace {

std::string random_text(std::size_t bytes, unsigned seed) {
  std::mt19937 random(seed);
  std::string text(bytes, ' ');
  for (char& letter : text) letter = static_cast<char>(random());
  return text;
}

}  // namespace

TEST_CASE("output file: pieces of several threads in any order give the file and its checksum") {
  const TemporaryFolder folder;
  for (unsigned seed = 0; seed < 5; ++seed) {
    std::mt19937 random(seed);
    const std::string text = random_text(300'000, seed);
    std::vector<std::pair<std::size_t, std::size_t>> pieces;
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t bytes = std::min(text.size() - at, 1 + random() % 9000);
      pieces.emplace_back(at, bytes);
      at += bytes;
    }
    std::shuffle(pieces.begin(), pieces.end(), random);
    const std::string name = "file" + std::to_string(seed);
    OutputFile file(FileSystem::real(), folder.path(), name, static_cast<int64_t>(text.size()));
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < 3; ++thread) {
      threads.emplace_back([&, thread] {
        for (std::size_t i = thread; i < pieces.size(); i += 3) {
          const auto [at, bytes] = pieces[i];
          file.write_at(static_cast<int64_t>(at), text.data() + at, static_cast<int64_t>(bytes));
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    const FileRecord expected{name, 300'000, crc32c(text.data(), text.size())};
    CHECK(file.finish() == expected);
    CHECK(file.finish() == expected);
    CHECK(contents_of(folder / name) == text);
  }
}

TEST_CASE("output file: large pieces, one after the other, and a file of no bytes") {
  const TemporaryFolder folder;
  const std::string text = random_text((33 << 20) + 5, 7);
  OutputFile file(FileSystem::real(), folder.path(), "large", static_cast<int64_t>(text.size()));
  file.write_at(0, text.data(), 33 << 20);
  file.write_at(33 << 20, text.data() + (33 << 20), 5);
  CHECK(file.finish().crc32c == crc32c(text.data(), text.size()));
  CHECK(contents_of(folder / "large") == text);
  OutputFile empty(FileSystem::real(), folder.path(), "empty", 0);
  empty.write_at(0, nullptr, 0);
  CHECK(empty.finish() == FileRecord{"empty", 0, 0});
}

TEST_CASE(
    "output file: pieces of a large file at any place, also where the disk takes less, or only through its cache") {
  const TemporaryFolder folder;
  const std::string text = random_text(6'000'001, 3);
  int file_number = 0;
  for (const int64_t most_at_once : {0, 4096, 5000, 100'000}) {
    for (const int refused : {0, EINVAL}) {
      FaultyFiles files;
      files.most_at_once = most_at_once;
      const std::set<int> past_the_cache = {0, 3, 5};  // of the writes of two pieces
      int writes = 0;
      files.fault = [&](Call call, const std::string&, int) {
        if (call == Call::kReserve && refused != 0) return EOPNOTSUPP;
        if (call != Call::kWrite || most_at_once != 0) return 0;
        return past_the_cache.contains(writes++) ? refused : 0;
      };
      const std::string name = std::to_string(file_number++);
      OutputFile file(files, folder.path(), name, static_cast<int64_t>(text.size()));
      std::vector<int64_t> cuts = {0, 200'000, 200'001, 1'048'576, 1'300'000, 5'500'000, 6'000'001};
      if (refused != 0 && most_at_once == 0) cuts = {0, 4096 * 1400, 6'000'001};
      for (std::size_t i = cuts.size() - 1; i > 0; --i) {
        file.write_at(cuts[i - 1], text.data() + cuts[i - 1], cuts[i] - cuts[i - 1]);
      }
      CHECK(file.finish() == FileRecord{name, 6'000'001, crc32c(text.data(), text.size())});
      CHECK(contents_of(folder / name) == text);
    }
  }
}

TEST_CASE("output file: a full disk is told before a byte of a large file is written") {
  const TemporaryFolder folder;
  FaultyFiles files;
  files.fault = [](Call call, const std::string&, int) { return call == Call::kReserve ? ENOSPC : 0; };
  CHECK(contains(error_of<Error>([&] { OutputFile(files, folder.path(), "a", 1 << 20); }),
                 "cannot set 1.00 MiB aside for " + folder.path() + "/a: No space left on device"));
}

TEST_CASE("output file: pieces outside, twice, missing or late are refused") {
  const TemporaryFolder folder;
  OutputFile file(FileSystem::real(), folder.path(), "a", 100);
  const std::string text(200, 'x');
  const auto write = [&](int64_t offset, int64_t bytes) {
    return error_of<std::invalid_argument>([&] { file.write_at(offset, text.data(), bytes); });
  };
  CHECK(contains(write(-1, 5), "within its announced 100 bytes"));
  CHECK(contains(write(96, 5), "within its announced 100 bytes"));
  CHECK(contains(write(101, 0), "within its announced 100 bytes"));
  file.write_at(10, text.data(), 20);
  file.write_at(60, text.data(), 10);
  for (const auto& [offset, bytes] :
       std::vector<std::pair<int64_t, int64_t>>{{10, 20}, {0, 11}, {29, 1}, {15, 2}, {0, 100}}) {
    CHECK(contains(write(offset, bytes), "written before"));
  }
  CHECK(contains(error_of<Error>([&] { file.finish(); }), "'a' is finished with 30 of its 100 bytes"));
  file.write_at(0, text.data(), 10);
  file.write_at(30, text.data(), 30);
  file.write_at(70, text.data(), 30);
  CHECK(file.finish().crc32c == crc32c(text.data(), 100));
  CHECK(contains(write(0, 1), "after it had been finished"));
  CHECK(contains(error_of<Error>([&] { OutputFile(FileSystem::real(), folder.path(), "a", 1); }), "File exists"));
  CHECK_THROWS_AS(OutputFile(FileSystem::real(), folder.path(), "b", -1), std::invalid_argument);
}

TEST_CASE("output file: what the disk refuses fails there and in finish") {
  const TemporaryFolder folder;
  for (const Call failing : {Call::kWrite, Call::kSync, Call::kClose}) {
    FaultyFiles files;
    OutputFile file(files, folder.path(), "file" + std::to_string(static_cast<int>(failing)), 4);
    bool once = true;
    files.fault = [&](Call call, const std::string&, int) {
      return call == failing && std::exchange(once, false) ? EIO : 0;
    };
    if (failing == Call::kWrite) {
      CHECK_THROWS_AS(file.write_at(0, "abcd", 4), Error);
    } else {
      file.write_at(0, "abcd", 4);
    }
    for (int time = 0; time < 2; ++time) CHECK(contains(error_of<Error>([&] { file.finish(); }), "Input/output error"));
  }
}
