#include <roundpipe/files/run_folder.h>

#include <unistd.h>

#include <stdexcept>
#include <string_view>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/files/steps.h>

namespace roundpipe::files {
namespace {

// Beyond the files: the manifest and the folders.
constexpr int64_t kReserve_bytes = 1 << 20;

bool is_complete(const std::string& folder, FileSystem& files) {
  try {
    require_complete(folder, files);
    return true;
  } catch (const Error&) {
    return false;
  }
}

std::shared_ptr<RunState> open_run(const std::string& folder, FileSystem& files) {
  files.make_folders(folder);
  return std::make_shared<RunState>(folder, files);
}

}  // namespace

RunFolder::RunFolder(const std::string& folder, FileSystem& files) : run_(open_run(folder, files)) { clean_up(); }

// Names are those of StepWriter::aside and of prune: ".step-N.", why it is hidden, and whose it was.
void RunFolder::clean_up() {
  FileSystem& files = run_->files;
  for (const std::string& name : files.list(run_->folder)) {
    if (name.front() != '.') continue;
    const std::size_t dot = name.find('.', 1);
    const auto step = step_of(std::string_view(name).substr(1, dot == std::string::npos ? dot : dot - 1));
    if (!step || dot == std::string::npos) continue;
    const std::string_view why = std::string_view(name).substr(dot + 1);
    const std::string hidden = join(run_->folder, name);
    const std::string place = join(run_->folder, step_name(*step));
    try {
      if (why.starts_with("partial-") || why.starts_with("removed-")) {
        files.remove_tree(hidden);
        notices_.push_back(concat("removed ", hidden, ", which a run that was ended has left"));
      } else if (why.starts_with("replaced-") && is_complete(place, files)) {
        files.remove_tree(hidden);
        notices_.push_back(concat("removed ", hidden, ", since ", place, " has replaced it"));
      } else if (why.starts_with("replaced-") && files.look(place).kind == EntryKind::kNothing) {
        files.rename(hidden, place);
        files.sync_folder(run_->folder);
        notices_.push_back(concat("restored ", place, ", since what was to replace it was not completed"));
      }
    } catch (const Error& error) {
      notices_.push_back(concat("left ", hidden, ": ", error.what()));
    }
  }
}

std::unique_ptr<StepWriter> RunFolder::begin(int64_t step, const BeginOptions& options) {
  if (options.total_bytes > 0) {
    const int64_t free_bytes = run_->files.free_bytes(run_->folder);
    if (free_bytes < kReserve_bytes || free_bytes - kReserve_bytes < options.total_bytes) {
      throw Error(concat("[checkpoint] the checkpoint of step ", step, " takes ", format_bytes(options.total_bytes),
                         ", and the disk of ", run_->folder, " has ", format_bytes(free_bytes),
                         " free; free some space there, keep fewer checkpoints, or choose a folder on another disk"));
    }
  }
  return std::make_unique<StepWriter>(run_, step, options.replace);
}

std::unique_ptr<Journal> RunFolder::open_journal(int64_t after_step) {
  return std::make_unique<Journal>(run_, after_step);
}

std::vector<int64_t> RunFolder::steps() const { return complete_steps(run_->folder, run_->files); }

std::optional<int64_t> RunFolder::latest() const { return latest_step(run_->folder, run_->files); }

Pruned RunFolder::prune(const Retention& retention) {
  if (retention.keep_last < 1 || retention.keep_every < 0) {
    throw std::invalid_argument(concat("[checkpoint] keep_last is ", retention.keep_last, " and keep_every ",
                                       retention.keep_every, ", expected at least 1 and at least 0"));
  }
  run_->lock.require_own_process();
  Pruned pruned;
  MutexLock lock(run_->mutex);
  try {
    std::vector<int64_t> complete = steps();
    std::erase_if(complete, [&](int64_t step) { return retention.newest && step > *retention.newest; });
    for (std::size_t i = 0; i < complete.size(); ++i) {
      const int64_t step = complete[i];
      const auto newer = static_cast<int64_t>(complete.size() - 1 - i);
      if (newer < retention.keep_last || (retention.keep_every != 0 && step % retention.keep_every == 0)) continue;
      remove(step, pruned);
    }
    if (!pruned.removed.empty()) run_->files.sync_folder(run_->folder);
  } catch (const Error& error) {
    pruned.notices.push_back(concat("older checkpoints may still be there: ", error.what()));
  }
  return pruned;
}

void RunFolder::remove(int64_t step, Pruned& pruned) {
  FileSystem& files = run_->files;
  const std::string hidden =
      join(run_->folder, concat(".", step_name(step), ".removed-", ::getpid(), "-", run_->writers++));
  try {
    files.rename(join(run_->folder, step_name(step)), hidden);
  } catch (const Error& error) {
    pruned.notices.push_back(concat("step ", step, " is older than what is kept and is still there: ", error.what()));
    return;
  }
  pruned.removed.push_back(step);
  try {
    files.remove_tree(hidden);
  } catch (const Error& error) {
    pruned.notices.push_back(concat("step ", step, " is older than what is kept, and what is left of it lies in ",
                                    hidden,
                                    " until the next program that writes to the run removes it: ", error.what()));
  }
}

}  // namespace roundpipe::files
