#include <roundpipe/checkpoint/step_writer.h>

#include <unistd.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include <roundpipe/checkpoint/steps.h>
#include <roundpipe/core/error.h>

namespace roundpipe::checkpoint {

StepWriter::StepWriter(std::shared_ptr<RunState> run, int64_t step, bool replace)
    : run_(std::move(run)), step_(step), replace_(replace) {
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
  folder_ = aside("partial");
  try {
    run_->files.make_folder(folder_);
  } catch (...) {
    MutexLock lock(run_->mutex);
    run_->being_written.erase(step_);
    throw;
  }
}

StepWriter::~StepWriter() {
  if (!run_->lock.is_of_this_process()) return;  // the parent is writing there
  {
    MutexLock lock(mutex_);
    outputs_.clear();
  }
  if (!placed_) {
    try {
      run_->files.remove_tree(folder_);
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
  if (!is_file_name(name)) {
    throw std::invalid_argument(concat("[checkpoint] '", name,
                                       "' cannot be a file of a checkpoint; expected a plain "
                                       "name without '/', not beginning with '.'"));
  }
  MutexLock lock(mutex_);
  auto& output = outputs_[name];
  if (output) {
    throw std::invalid_argument(concat("[checkpoint] '", name, "' is in the checkpoint already; use another name"));
  }
  try {
    output = std::make_unique<OutputFile>(run_->files, folder_, name, bytes);
  } catch (...) {
    outputs_.erase(name);
    throw;
  }
  return *output;
}

void StepWriter::add_small(const std::string& name, const std::string& contents) {
  OutputFile& file = create(name, static_cast<int64_t>(contents.size()));
  file.write_at(0, contents.data(), file.bytes());
  file.finish();
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
  std::string old = folder_;  // where the one before is then
  if (!taken) {
    files.rename(folder_, place);
  } else if (!files.exchange(folder_, place)) {
    old = aside("replaced");
    files.rename(place, old);
    try {
      files.rename(folder_, place);
    } catch (...) {
      files.rename(old, place);  // if this fails too, opening the run folder again does it
      throw;
    }
  }
  placed_ = true;
  files.sync_folder(run_->folder);
  if (!taken) return;
  try {
    files.remove_tree(old);
  } catch (const Error&) {  // removed when the folder is opened again
  }
}

Manifest StepWriter::commit(const std::map<std::string, std::string>& writer) {
  run_->lock.require_own_process();
  Manifest manifest{step_, {}, writer};
  {
    MutexLock lock(mutex_);
    for (const auto& [name, output] : outputs_) manifest.files.push_back(output->finish());
  }
  const std::string text = print_manifest(manifest);
  File file = run_->files.create(join(folder_, kManifestName));
  file.write(0, text.data(), static_cast<int64_t>(text.size()));
  file.sync();
  file.close();
  run_->files.sync_folder(folder_);
  take_place();
  return manifest;
}

}  // namespace roundpipe::checkpoint
