#include <roundpipe/checkpoint/journal.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <functional>
#include <stdexcept>
#include <utility>

#include <roundpipe/checkpoint/crc32c.h>
#include <roundpipe/checkpoint/manifest.h>
#include <roundpipe/core/error.h>

#include "json_text.h"

namespace roundpipe::checkpoint {
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

JournalContents read_journal(const std::string& run_folder, int64_t after_step, FileSystem& files) {
  const std::string path = join(run_folder, kJournalName);
  if (files.look(path).kind == EntryKind::kNothing) return {};
  File file = files.open_to_read(path);
  return read(file, after_step);
}

Journal::Journal(std::shared_ptr<RunState> run, int64_t after_step) : run_(std::move(run)) {
  run_->lock.require_own_process();
  {
    MutexLock lock(run_->mutex);
    if (std::exchange(run_->has_journal, true)) {
      throw Error(concat("[journal] the journal of ", run_->folder,
                         " is open in this process, expected one writer; close that one first"));
    }
  }
  try {
    const std::string path = join(run_->folder, kJournalName);
    MutexLock lock(mutex_);
    file_.emplace(run_->files.open_to_update(path));
    JournalContents contents = read(*file_, after_step);
    notice_ = std::move(contents.notice);
    for (JournalRecord& record : contents.records) to_replay_.emplace(record.step, std::move(record.text));
    end_ = contents.whole_bytes;
    torn_ = true;
    if (end_ == 0) {
      write(kVersion);
      run_->files.sync_folder(run_->folder);
    } else if (!notice_.empty()) {
      file_->truncate(end_);
      file_->sync();
    }
    torn_ = false;
  } catch (...) {
    MutexLock lock(run_->mutex);
    run_->has_journal = false;
    throw;
  }
}

Journal::~Journal() {
  MutexLock lock(run_->mutex);
  run_->has_journal = false;
}

std::optional<std::string> Journal::recorded(int64_t step) const {
  MutexLock lock(mutex_);
  const auto found = to_replay_.find(step);
  if (found == to_replay_.end()) return {};
  return found->second;
}

std::optional<int64_t> Journal::last_recorded() const {
  MutexLock lock(mutex_);
  if (to_replay_.empty()) return {};
  return to_replay_.rbegin()->first;
}

void Journal::write(std::string_view body) {
  run_->lock.require_own_process();
  if (torn_) file_->truncate(end_);
  torn_ = true;
  const std::string line = line_of(body);
  file_->write(end_, line.data(), static_cast<int64_t>(line.size()));
  file_->sync();
  torn_ = false;
  end_ += static_cast<int64_t>(line.size());
}

void Journal::append(int64_t step, std::string_view text) {
  check_record(step, text);
  MutexLock lock(mutex_);
  const auto replayed = to_replay_.find(step);
  if (replayed == to_replay_.end() || replayed->second != text) write(concat("step ", step, " ", text));
  if (replayed != to_replay_.end()) to_replay_.erase(replayed);
}

void Journal::rewind(int64_t step) {
  if (step < 0) {
    throw std::invalid_argument(concat("[journal] rewind to step ", step, ", expected a step of 0 or more"));
  }
  MutexLock lock(mutex_);
  write(concat("rewind ", step));
  to_replay_.erase(to_replay_.upper_bound(step), to_replay_.end());
}

}  // namespace roundpipe::checkpoint
