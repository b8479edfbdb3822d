#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/files/file_system.h>
#include <roundpipe/files/journal.h>
#include <roundpipe/files/run_state.h>
#include <roundpipe/files/step_writer.h>

namespace roundpipe::files {

struct BeginOptions {
  // What the checkpoint takes on the disk; 0 = not known. Less free space is refused before anything is written.
  int64_t total_bytes = 0;
  // A checkpoint of this step may be there. It stays until the new one takes its place, in one step where the disk's
  // format has that (all usual ones of Linux); elsewhere it is hidden for a moment, and restored after a crash.
  bool replace = false;
};

struct Retention {
  int64_t keep_last = 1;   // of the newest complete checkpoints, at least 1
  int64_t keep_every = 0;  // and those of steps that are multiples of this; 0 = none
  // Later checkpoints neither count nor are removed: of a training that went back, they are damaged, or of another
  // history.
  std::optional<int64_t> newest = std::nullopt;
};

struct Pruned {
  std::vector<int64_t> removed;      // steps that are no longer there
  std::vector<std::string> notices;  // what could not be removed, for the user to read
};

// The folder of a training run, to write in: step-10, step-20, ... Each is a complete checkpoint from the moment that
// it has this name; what is being written or removed is hidden. See steps.h for reading one.
// Thread safety: any thread. Writers may outlive the object, and hold its lock.
class RunFolder {
 public:
  // Makes the folder if it is not there, takes its lock, and removes what killed processes have left in it. Throws
  // Error where another process, or another object of this one, has the lock.
  explicit RunFolder(const std::string& folder, FileSystem& files = FileSystem::real());

  const std::string& path() const { return run_->folder; }
  // What was found when it was opened, for the user to read: left-overs removed, a checkpoint restored.
  const std::vector<std::string>& notices() const { return notices_; }

  // Begins a checkpoint, beside others that are being written.
  std::unique_ptr<StepWriter> begin(int64_t step, const BeginOptions& options = {});

  // The journal, to write in; one at a time. See Journal.
  std::unique_ptr<Journal> open_journal(int64_t after_step);

  // The complete checkpoints: see steps.h.
  std::vector<int64_t> steps() const;
  std::optional<int64_t> latest() const;

  // Removes complete checkpoints that `retention` does not name. The newest complete one stays in any case, and so do
  // folders that are no complete checkpoint. What the disk refuses is no error: the checkpoints that are kept are
  // complete.
  Pruned prune(const Retention& retention);

 private:
  void clean_up();
  void remove(int64_t step, Pruned& pruned) ROUNDPIPE_REQUIRES(run_->mutex);

  const std::shared_ptr<RunState> run_;
  std::vector<std::string> notices_;
};

}  // namespace roundpipe::files
