#include <roundpipe/files/step_writer.h>

#include <unistd.h>

#include <stdexcept>
#include <utility>

#include <roundpipe/core/error.h>
#include <roundpipe/files/damage.h>
#include <roundpipe/files/steps.h>

namespace roundpipe::files {

namespace {

// Something is there that cannot be loaded.
bool is_damaged(const std::string& place, FileSystem& files) {
  if (files.look(place).kind == EntryKind::kNothing) return false;
  if (is_known_damaged(place)) return true;
  FoundStep found{.step = kAnyStep, .folder = place, .problem = {}};
  check(found, files);
  return !found.problem.empty();
}

}  // namespace

StepWriter::StepWriter(std::shared_ptr<RunState> run, int64_t step, bool replace)
    : run_(std::move(run)),
      step_(step),
      replace_(replace || is_damaged(join(run_->folder, step_name(step)), run_->files)) {
  run_->lock.require_own_process();
  const std::string place = join(run_->folder, step_name(step_));
  if (!replace_ && run_->files.look(place).kind != EntryKind::kNothing) {
    throw Error(concat("[checkpoint] ", place, " is there already; save another step, or ask for it to be replaced"));
  }
  {
    MutexLock lock(run_->mutex);
    if (!run_->being_written.insert(step_).second) {
      throw Error(concat("[checkpoint] step ", step_, " is being written to ", run_->folder,
                         " already; wait for that save to end"));
    }
    number_ = run_->writers++;
  }
  files_ = std::make_unique<StepFiles>(aside("partial"), run_->files);
  try {
    run_->files.make_folder(folder());
  } catch (...) {
    MutexLock lock(run_->mutex);
    run_->being_written.erase(step_);
    throw;
  }
}

StepWriter::~StepWriter() {
  if (!run_->lock.is_of_this_process()) return;  // the parent is writing there
  files_->close();
  if (!placed_) {
    try {
      run_->files.remove_tree(folder());
    } catch (const Error&) {  // removed when the folder is opened again
    }
  }
  MutexLock lock(run_->mutex);
  run_->being_written.erase(step_);
}

// ".step-120.partial-4711-0": hidden, and told apart from those of other processes.
std::string StepWriter::aside(const char* why) const {
  return join(run_->folder, concat(".", step_name(step_), ".", why, "-", ::getpid(), "-", number_));
}

OutputFile& StepWriter::create(const std::string& name, int64_t bytes) {
  run_->lock.require_own_process();
  return files_->create(name, bytes);
}

void StepWriter::add_small(const std::string& name, const std::string& contents) {
  run_->lock.require_own_process();
  files_->add_small(name, contents);
}

void StepWriter::adopt(const std::vector<FileRecord>& records, const std::string& whose) {
  for (const FileRecord& record : records) {
    const Entry found = run_->files.look(join(folder(), record.name));
    if (found.kind != EntryKind::kFile || found.bytes != record.bytes) {
      throw Error(concat("[checkpoint] '", record.name, "', which ", whose, " has written with ", record.bytes,
                         " bytes, ", found.kind == EntryKind::kFile ? "has another size" : "is not there", " in ",
                         run_->folder, "; give a folder that all of them share"));
    }
    adopted_.push_back(record);
  }
}

void StepWriter::take_place() {
  FileSystem& files = run_->files;
  const std::string place = join(run_->folder, step_name(step_));
  MutexLock lock(run_->mutex);
  const bool taken = files.look(place).kind != EntryKind::kNothing;
  if (taken && !replace_) {
    throw Error(concat("[checkpoint] ", place, " has appeared while step ", step_,
                       " was being written there; let one program write into a run folder"));
  }
  std::string old = folder();  // where the one before is then
  if (!taken) {
    files.rename(folder(), place);
  } else if (!files.exchange(folder(), place)) {
    old = aside("replaced");
    files.rename(place, old);
    try {
      files.rename(folder(), place);
    } catch (...) {
      files.rename(old, place);  // if this fails too, opening the run folder again does it
      throw;
    }
  }
  placed_ = true;
  forget_damaged(place);
  try {
    files.sync_folder(run_->folder);
  } catch (const Error& error) {
    throw Error(concat("[checkpoint] ", place, " is complete, but may be lost if the power fails now: ", error.what()));
  }
  if (!taken) return;
  try {
    files.remove_tree(old);
  } catch (const Error&) {  // removed when the folder is opened again
  }
}

Manifest StepWriter::commit(const std::map<std::string, std::string>& writer, int64_t nodes) {
  run_->lock.require_own_process();
  Manifest manifest{.step = step_, .files = files_->finish(), .writer = writer, .nodes = nodes};
  manifest.files.insert(manifest.files.end(), adopted_.begin(), adopted_.end());
  const std::string text = print_manifest(manifest);
  File file = run_->files.create(join(folder(), kManifestName));
  file.write(0, text.data(), static_cast<int64_t>(text.size()));
  file.sync();
  file.close();
  run_->files.sync_folder(folder());
  take_place();
  return manifest;
}

std::string failed_save_notice(int64_t step, const std::string& error, std::optional<bool> placed) {
  const char* const what = !placed   ? " may not have been saved: the process that completes it knows"
                           : *placed ? " is there and complete all the same"
                                     : " was not saved";
  return concat(error, "\n[save_checkpoint] step ", step, what, "; training goes on");
}

}  // namespace roundpipe::files
