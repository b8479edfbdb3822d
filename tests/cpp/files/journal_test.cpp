#include <roundpipe/files/journal.h>

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

using Records = std::vector<JournalRecord>;

std::string text_of(int64_t step) {
  return "{\"loss\":" + std::to_string(10 - step) + ".25,\"data\":\"p" + std::to_string(step) + "\"}";
}

// Steps 1 to `steps`.
void fill(const std::string& folder, int64_t steps) {
  RunFolder run(folder);
  const auto journal = run.open_journal(0);
  for (int64_t step = 1; step <= steps; ++step) journal->append(step, text_of(step));
}

}  // namespace

TEST_CASE("journal: what is recorded is read, from any step on") {
  const TemporaryFolder folder(kMemory);
  CHECK(read_journal(folder.path()).records.empty());
  fill(folder.path(), 3);
  const JournalContents contents = read_journal(folder.path());
  CHECK(contents.records == Records{{1, text_of(1)}, {2, text_of(2)}, {3, text_of(3)}});
  CHECK(contents.notice.empty());
  CHECK(read_journal(folder.path(), 2).records == Records{{3, text_of(3)}});
  CHECK(read_journal(folder.path(), 3).records.empty());
  const std::string text = contents_of(folder / kJournalName);
  CHECK(contents.whole_bytes == static_cast<int64_t>(text.size()));
  CHECK(contains(text, " 00011 journal 1.0\n"));
  CHECK(contains(text, "step 2 " + text_of(2) + "\n"));
}

TEST_CASE("journal: a replay writes only what differs, and keeps what comes later") {
  const TemporaryFolder folder(kMemory);
  fill(folder.path(), 5);
  const int64_t bytes = read_journal(folder.path()).whole_bytes;
  {
    RunFolder run(folder.path());
    const auto journal = run.open_journal(2);
    CHECK(journal->notice().empty());
    CHECK(journal->last_recorded() == 5);
    CHECK(journal->recorded(3) == text_of(3));
    CHECK_FALSE(journal->recorded(2));
    journal->append(3, text_of(3));
    CHECK_FALSE(journal->recorded(3));
    CHECK(read_journal(folder.path()).whole_bytes == bytes);
    journal->append(4, "{\"loss\":0}");
  }
  CHECK(read_journal(folder.path(), 2).records == Records{{3, text_of(3)}, {4, "{\"loss\":0}"}, {5, text_of(5)}});
  {
    RunFolder run(folder.path());
    const auto journal = run.open_journal(3);
    CHECK(journal->recorded(4) == "{\"loss\":0}");
    journal->rewind(4);
    CHECK(journal->last_recorded() == 4);
    journal->append(4, "{}");
    journal->append(6, text_of(6));
    CHECK_FALSE(journal->last_recorded());
  }
  CHECK(read_journal(folder.path(), 3).records == Records{{4, "{}"}, {6, text_of(6)}});
}

TEST_CASE("journal: an end torn anywhere is left out and cut off, and no record before it is lost") {
  const TemporaryFolder folder(kMemory);
  fill(folder.path(), 3);
  const std::string whole = contents_of(folder / kJournalName);
  const std::size_t third = whole.find("step 3") - 15;
  for (std::size_t cut = 0; cut <= whole.size(); ++cut) {
    write_file(folder / kJournalName, whole.substr(0, cut));
    const JournalContents contents = read_journal(folder.path(), 1);
    CHECK(contents.records.size() == (cut == whole.size() ? 2 : cut >= third ? 1 : 0));
    CHECK(contents.notice.empty() == (contents.whole_bytes == static_cast<int64_t>(cut)));
    RunFolder run(folder.path());
    const auto journal = run.open_journal(1);
    CHECK(journal->notice() == contents.notice);
    journal->append(9, text_of(9));
    const JournalContents after = read_journal(folder.path(), 1);
    CHECK(after.notice.empty());
    REQUIRE(after.records.size() == contents.records.size() + 1);
    CHECK(after.records.back() == JournalRecord{9, text_of(9)});
  }
  // What a disk leaves that has lengthened the file before it wrote.
  write_file(folder / kJournalName, whole + std::string(5000, '\0'));
  CHECK(contains(read_journal(folder.path()).notice, "the last 5000 bytes are no whole record"));
  write_file(folder / kJournalName, whole + std::string(3'000'000, 'x') + "\n");
  CHECK(read_journal(folder.path()).records.size() == 3);
}

TEST_CASE("journal: a flipped bit before the end is refused, and the place named") {
  const TemporaryFolder folder(kMemory);
  fill(folder.path(), 3);
  const std::string whole = contents_of(folder / kJournalName);
  const std::size_t last = whole.find("step 3") - 15;
  for (std::size_t at = 0; at < whole.size(); ++at) {
    std::string flipped = whole;
    flipped[at] = static_cast<char>(flipped[at] ^ (1 << at % 8));
    write_file(folder / kJournalName, flipped);
    CAPTURE(at);
    if (at >= last) {
      CHECK(read_journal(folder.path()).records.size() == 2);
    } else {
      const std::string message = error_of<Error>([&] { read_journal(folder.path()); });
      CHECK((contains(message, "is damaged at byte") || contains(message, "does not begin as a journal")));
    }
  }
}

TEST_CASE("journal: other formats") {
  const TemporaryFolder folder(kMemory);
  fill(folder.path(), 1);
  const auto refusal = [&](const std::string& contents) {
    write_file(folder / kJournalName, contents);
    return error_of<Error>([&] { read_journal(folder.path()); });
  };
  CHECK(contains(refusal("fbeb7a04 00011 journal 2.0\n"), "does not begin as a journal"));
  CHECK(contains(refusal("a user's notes\n"), "does not begin as a journal"));
  CHECK(contains(refusal("a user's notes"), "does not begin as a journal"));
}

TEST_CASE("journal: records that are not right are refused") {
  const TemporaryFolder folder(kMemory);
  RunFolder run(folder.path());
  const auto journal = run.open_journal(0);
  const std::string most = "{\"a\":\"" + std::string(kMostRecord_bytes - 8, 'x') + "\"}";
  journal->append(1, most);
  CHECK(read_journal(folder.path()).records == Records{{1, most}});
  for (const std::string& text :
       std::vector<std::string>{"", "[1]", "{\"a\":1", "{\n}", "{\"a\":1} ,", "{\"a\":\"\xFF\"}", most + " "}) {
    CHECK(contains(error_of<std::invalid_argument>([&] { journal->append(2, text); }), "the record of step 2"));
  }
  CHECK_THROWS_AS(journal->append(-1, "{}"), std::invalid_argument);
  CHECK_THROWS_AS(journal->rewind(-1), std::invalid_argument);
  CHECK(contains(error_of<Error>([&] { run.open_journal(0); }), "is open in this process"));
}

TEST_CASE("journal: whichever system call fails, completed steps stay, and later ones are recorded") {
  for (const bool fresh : {true, false}) {
    for (int failing = 0;; ++failing) {
      const TemporaryFolder folder(kMemory);
      if (!fresh) {
        fill(folder.path(), 1);
        write_file(folder / kJournalName, contents_of(folder / kJournalName) + "torn");
      }
      FaultyFiles files;
      RunFolder run(folder.path(), files);
      bool reached = false;
      files.calls = 0;
      files.most_at_once = 10;  // so that a write fails half-way
      files.fault = [&](Call, const std::string&, int number) {
        reached = reached || number == failing;
        return number == failing ? EIO : 0;
      };
      Records expected;
      if (!fresh) expected.push_back({1, text_of(1)});
      std::unique_ptr<Journal> journal;
      for (int time = 0; time < 2 && !journal; ++time) {
        try {
          journal = run.open_journal(0);
        } catch (const Error&) {
        }
      }
      REQUIRE(journal);
      for (int64_t step = 2; step <= 4; ++step) {
        try {
          journal->append(step, text_of(step));
          expected.push_back({step, text_of(step)});
        } catch (const Error&) {
        }
      }
      files.fault = nullptr;
      const JournalContents contents = read_journal(folder.path());
      CAPTURE(failing);
      REQUIRE(contents.records.size() >= expected.size());
      for (const JournalRecord& record : expected) {
        CHECK(std::find(contents.records.begin(), contents.records.end(), record) != contents.records.end());
      }
      journal->append(5, text_of(5));
      CHECK(read_journal(folder.path(), 4).records == Records{{5, text_of(5)}});
      CHECK(read_journal(folder.path()).notice.empty());
      if (!reached) break;
    }
  }
}
