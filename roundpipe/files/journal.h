#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace roundpipe::files {

class FileSystem;
struct RunState;

// The journal of a run: what is known of each completed step, so that a run that was killed between two checkpoints
// does its steps again and compares.
//
// "journal.log" in the run folder is only ever appended to, and each append is synced. A line is
//   CHECKSUM LENGTH BODY     crc32c of "LENGTH BODY" in eight hexadecimal digits, the body's bytes in five digits
// and a body one of
//   journal 1.0              the first line: the format's version
//   step 120 {...}           step 120 is completed; any JSON object
//   rewind 100               what was recorded after step 100 is void
// Of several records of a step, the last one counts, and it leaves later steps as they are. So a replay that is killed
// has lost nothing of what came after, and what a replay finds different takes the old records' places one by one.
// Other bodies are of newer minor versions, and ignored.

inline constexpr const char* kJournalName = "journal.log";
inline constexpr std::size_t kMostRecord_bytes = 64 << 10;

struct JournalRecord {
  int64_t step = 0;
  std::string text;  // a JSON object in one line

  bool operator==(const JournalRecord&) const = default;
};

struct JournalContents {
  std::vector<JournalRecord> records;  // by step
  std::string notice;                  // what is wrong with the end; empty: nothing
  int64_t whole_bytes = 0;             // up to there the file is right
};

// Reads the records of steps after `after_step`; none where there is no journal. An end that was torn by a crash, or
// is being written, is left out, with a notice. Damage before the end is an Error that names the place, and so is
// another major version. Memory: bounded by the records returned. No lock is taken.
JournalContents read_journal(const std::string& run_folder, int64_t after_step = -1);
JournalContents read_journal(const std::string& run_folder, int64_t after_step, FileSystem& files);

// The journal, to write in. RunFolder::open_journal makes it; it holds the folder's lock. Thread safety: any thread.
class Journal {
 public:
  // Cuts off a torn end. `after_step`: the step that training goes on from; records after it are to be replayed.
  Journal(std::shared_ptr<RunState> run, int64_t after_step);
  ~Journal();
  Journal(const Journal&) = delete;
  Journal& operator=(const Journal&) = delete;

  // What was cut off, for the user to read; empty: nothing.
  const std::string& notice() const;

  // The record of a step that is to be replayed; nothing for other steps.
  std::optional<std::string> recorded(int64_t step) const;
  // The last step that is to be replayed; nothing where there is none.
  std::optional<int64_t> last_recorded() const;

  // Records that a step is completed: returns when the record is on the disk. Nothing is written where the very same
  // record is to be replayed. `text`: a JSON object in one line, of at most 64 KiB; else std::invalid_argument.
  // After an Error the step is not recorded, and the next append repairs the file's end first.
  void append(int64_t step, std::string_view text);

  // From now on, what was recorded after `step` is void: the run goes another way from there. The lines stay.
  void rewind(int64_t step);

 private:
  struct Core;
  const std::unique_ptr<Core> core_;
};

}  // namespace roundpipe::files
