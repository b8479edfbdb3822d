#include <roundpipe/files/journal.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <functional>
#include <map>
#include <stdexcept>
#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/files/crc32c.h>
#include <roundpipe/files/file_system.h>
#include <roundpipe/files/manifest.h>
#include <roundpipe/files/run_state.h>

#include "json_text.h"

namespace roundpipe::files {
namespace {

constexpr std::string_view kVersion = "journal 1.0";
constexpr std::size_t kChecksumDigits = 8;
constexpr std::size_t kLengthDigits = 5;
constexpr std::size_t kPrefix_bytes = kChecksumDigits + 1 + kLengthDigits + 1;
constexpr std::size_t kMostBody_bytes = kMostRecord_bytes + 32;
constexpr std::size_t kMostLine_bytes = 2 * (kPrefix_bytes + kMostBody_bytes) + 2;  // two that became one
constexpr int64_t kBuffer_bytes = 1 << 20;

std::string length_of(std::string_view body) {
  std::array<char, 24> length{};
  std::snprintf(length.data(), length.size(), "%05zu ", body.size());
  return length.data();
}

std::string line_of(std::string_view body) {
  const std::string summed = length_of(body).append(body);
  return concat(format_crc32c(crc32c(summed.data(), summed.size())), " ", summed, "\n");
}

// The body of a line without its end, nothing where the line is not right.
std::optional<std::string_view> body_of(std::string_view line) {
  if (line.size() < kPrefix_bytes || line.size() - kPrefix_bytes > kMostBody_bytes) return {};
  const std::string_view body = line.substr(kPrefix_bytes);
  if (line.substr(kChecksumDigits + 1, kLengthDigits + 1) != length_of(body)) return {};  // before the longer look
  const std::string whole = line_of(body);
  if (std::string_view(whole).substr(0, whole.size() - 1) != line) return {};
  return body;
}

// Whether a line that is not right ends with one that is: the end between them is damaged.
bool ends_with_a_line(std::string_view line) {
  for (std::size_t at = 1; at + kPrefix_bytes <= line.size(); ++at) {
    const bool may_begin = line[at + kChecksumDigits] == ' ' && line[at + kPrefix_bytes - 1] == ' ';
    if (may_begin && body_of(line.substr(at))) return true;
  }
  return false;
}

// "step 120 {...}" -> 120, and what follows the number and a space. Nothing where there is no such number.
std::optional<std::pair<int64_t, std::string_view>> numbered(std::string_view body, std::string_view word) {
  if (!body.starts_with(word)) return {};
  body.remove_prefix(word.size());
  int64_t step = -1;
  const auto [end, error] = std::from_chars(body.data(), body.data() + body.size(), step);
  if (error != std::errc{} || step < 0) return {};
  body.remove_prefix(static_cast<std::size_t>(end - body.data()));
  if (!body.empty() && body.front() == ' ') body.remove_prefix(1);
  return {{step, body}};
}

// Calls `line` with each line of a file, without its end, and where it begins; `ended`: whether there is an end. Of a
// line longer than two of ours, only a beginning comes.
void for_each_line(File& file, const std::function<void(std::string_view, int64_t, bool ended)>& line) {
  const int64_t bytes = file.size();
  std::string buffer;
  std::string begun;  // a line that goes on in the next buffer
  int64_t begun_at = 0;
  for (int64_t at = 0; at < bytes;) {
    buffer.resize(static_cast<std::size_t>(std::min(kBuffer_bytes, bytes - at)));
    file.read(at, buffer.data(), static_cast<int64_t>(buffer.size()));
    std::string_view rest = buffer;
    while (!rest.empty()) {
      const std::size_t end = rest.find('\n');
      const std::string_view part = rest.substr(0, end);
      begun.append(part.substr(0, kMostLine_bytes - begun.size()));
      if (end == std::string_view::npos) {
        at += static_cast<int64_t>(rest.size());
        break;
      }
      rest.remove_prefix(end + 1);
      at += static_cast<int64_t>(end + 1);
      line(begun, begun_at, true);
      begun.clear();
      begun_at = at;
    }
  }
  if (begun_at != bytes) line(begun, begun_at, false);
}

// Reads line by line what a journal says.
class Reader {
 public:
  Reader(std::string path, int64_t after_step) : path_(std::move(path)), after_step_(after_step) {}

  void line(std::string_view text, int64_t at, bool ended) {
    const std::optional<std::string_view> body = ended ? body_of(text) : std::nullopt;
    if (!body) {
      if (!damaged_at_) damaged_at_ = at;
      if (ended && ends_with_a_line(text)) refuse_damage();
      // A version that was torn is all that there is, and the beginning of ours.
      if (at == 0 && (ended || !line_of(kVersion).starts_with(text))) no_journal_ = true;
      return;
    }
    if (damaged_at_) refuse_damage();
    if (at == 0) {
      check_version(*body);
    } else {
      take(*body);
    }
    whole_bytes_ = at + static_cast<int64_t>(text.size()) + 1;
  }

  JournalContents contents(int64_t file_bytes) {
    if (no_journal_) {
      throw Error(concat("[", path_,
                         "] the file does not begin as a journal does; it is damaged, or another kind of "
                         "file: move it away"));
    }
    JournalContents contents;
    for (auto& [step, text] : records_) contents.records.push_back({step, std::move(text)});
    contents.whole_bytes = whole_bytes_;
    if (whole_bytes_ != file_bytes) {
      contents.notice = concat("[", path_, "] the last ", file_bytes - whole_bytes_,
                               " bytes are no whole record, as a crash leaves them, and do not count");
    }
    return contents;
  }

 private:
  [[noreturn]] void refuse_damage() const {
    throw Error(concat("[", path_, "] the journal is damaged at byte ", *damaged_at_,
                       ", before records that are right, expected whole lines; to go on from the last checkpoint "
                       "without its records, move the file away"));
  }

  void check_version(std::string_view body) const {
    const auto version = numbered(body, "journal ");
    if (!version || !version->second.starts_with('.')) {
      throw Error(concat("[", path_, "] the first line is '", shown(body), "', expected '", kVersion,
                         "'; it is damaged, or another kind of file: move it away"));
    }
    if (version->first != 1) {
      throw Error(concat("[", path_, "] the journal has format ", version->first,
                         ".x, expected 1.x, which this version of roundpipe reads; use the version that wrote it"));
    }
  }

  void take(std::string_view body) {
    if (const auto rewind = numbered(body, "rewind ")) {
      records_.erase(records_.upper_bound(rewind->first), records_.end());
    } else if (const auto record = numbered(body, "step "); record && record->first > after_step_) {
      records_[record->first] = record->second;
    }
  }

  const std::string path_;
  const int64_t after_step_;
  std::map<int64_t, std::string> records_;
  std::optional<int64_t> damaged_at_;
  bool no_journal_ = false;
  int64_t whole_bytes_ = 0;
};

JournalContents read(File& file, int64_t after_step) {
  Reader reader(file.path(), after_step);
  for_each_line(file, [&](std::string_view text, int64_t at, bool ended) { reader.line(text, at, ended); });
  return reader.contents(file.size());
}

void check_record(int64_t step, std::string_view text) {
  const auto refuse = [&](const std::string& what) {
    throw std::invalid_argument(concat("[journal] the record of step ", step, " ", what,
                                       ", expected a JSON object in one line, of at most ", kMostRecord_bytes,
                                       " bytes, and a step of 0 or more"));
  };
  if (step < 0) refuse("has no step");
  if (text.size() > kMostRecord_bytes) refuse(concat("has ", text.size(), " bytes"));
  if (text.find('\n') != std::string_view::npos) refuse("has several lines");
  try {
    if (!parse_json(text, "journal").is_object()) refuse("is no object");
  } catch (const Error& error) {
    refuse(concat("is not right (", error.what(), ")"));
  }
}

}  // namespace

JournalContents read_journal(const std::string& run_folder, int64_t after_step) {
  return read_journal(run_folder, after_step, FileSystem::real());
}

JournalContents read_journal(const std::string& run_folder, int64_t after_step, FileSystem& files) {
  const std::string path = join(run_folder, kJournalName);
  if (files.look(path).kind == EntryKind::kNothing) return {};
  File file = files.open_to_read(path);
  return read(file, after_step);
}

struct Journal::Core {
  explicit Core(std::shared_ptr<RunState> of) : run(std::move(of)) {}

  void begin(int64_t after_step);
  void write(std::string_view body) ROUNDPIPE_REQUIRES(mutex);

  const std::shared_ptr<RunState> run;
  std::string notice;  // set before others see this

  Mutex mutex;
  std::optional<File> file ROUNDPIPE_GUARDED_BY(mutex);
  int64_t end ROUNDPIPE_GUARDED_BY(mutex) = 0;
  bool torn ROUNDPIPE_GUARDED_BY(mutex) = false;  // something may be behind `end`
  std::map<int64_t, std::string> to_replay ROUNDPIPE_GUARDED_BY(mutex);
};

void Journal::Core::begin(int64_t after_step) {
  const std::string path = join(run->folder, kJournalName);
  MutexLock lock(mutex);
  file.emplace(run->files.open_to_update(path));
  JournalContents contents = read(*file, after_step);
  notice = std::move(contents.notice);
  for (JournalRecord& record : contents.records) to_replay.emplace(record.step, std::move(record.text));
  end = contents.whole_bytes;
  torn = true;
  if (end == 0) {
    write(kVersion);
    run->files.sync_folder(run->folder);
  } else if (!notice.empty()) {
    file->truncate(end);
    file->sync();
  }
  torn = false;
}

void Journal::Core::write(std::string_view body) {
  run->lock.require_own_process();
  if (torn) file->truncate(end);
  torn = true;
  const std::string line = line_of(body);
  file->write(end, line.data(), static_cast<int64_t>(line.size()));
  file->sync();
  torn = false;
  end += static_cast<int64_t>(line.size());
}

Journal::Journal(std::shared_ptr<RunState> run, int64_t after_step) : core_(std::make_unique<Core>(std::move(run))) {
  RunState& state = *core_->run;
  state.lock.require_own_process();
  {
    MutexLock lock(state.mutex);
    if (std::exchange(state.has_journal, true)) {
      throw Error(concat("[journal] the journal of ", state.folder,
                         " is open in this process, expected one writer; close that one first"));
    }
  }
  try {
    core_->begin(after_step);
  } catch (...) {
    MutexLock lock(state.mutex);
    state.has_journal = false;
    throw;
  }
}

Journal::~Journal() {
  MutexLock lock(core_->run->mutex);
  core_->run->has_journal = false;
}

const std::string& Journal::notice() const { return core_->notice; }

std::optional<std::string> Journal::recorded(int64_t step) const {
  MutexLock lock(core_->mutex);
  const auto found = core_->to_replay.find(step);
  if (found == core_->to_replay.end()) return {};
  return found->second;
}

std::optional<int64_t> Journal::last_recorded() const {
  MutexLock lock(core_->mutex);
  if (core_->to_replay.empty()) return {};
  return core_->to_replay.rbegin()->first;
}

void Journal::append(int64_t step, std::string_view text) {
  check_record(step, text);
  MutexLock lock(core_->mutex);
  std::map<int64_t, std::string>& to_replay = core_->to_replay;
  const auto replayed = to_replay.find(step);
  if (replayed == to_replay.end() || replayed->second != text) core_->write(concat("step ", step, " ", text));
  if (replayed != to_replay.end()) to_replay.erase(replayed);
}

void Journal::rewind(int64_t step) {
  if (step < 0) {
    throw std::invalid_argument(concat("[journal] rewind to step ", step, ", expected a step of 0 or more"));
  }
  MutexLock lock(core_->mutex);
  core_->write(concat("rewind ", step));
  core_->to_replay.erase(core_->to_replay.upper_bound(step), core_->to_replay.end());
}

}  // namespace roundpipe::files
