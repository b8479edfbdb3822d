#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <roundpipe/files/journal.h>

namespace roundpipe::files {
class RunFolder;
}
namespace roundpipe::device {
class Event;
}

namespace roundpipe {

// The folder of a run, which this process writes to: made if it is not there, and locked until the process ends. The
// same object for the same folder; save_checkpoint uses it, too. What was found in it is told by Frontend::warn, or
// printed to stderr. Thread safety: any thread. Throws Error if another process writes to the folder, or it cannot be
// written to.
std::shared_ptr<files::RunFolder> run_folder(const std::string& folder);

// Begins the journal of such a folder: the completed steps, beside the checkpoints. `after_step`: the step that
// training goes on from; records after it are to be replayed. Throws as run_folder does, and Error if the journal is
// open already.
std::unique_ptr<files::Journal> open_journal(const std::string& folder, int64_t after_step);

// The folder of the newest complete checkpoint of a run; none if the run has no checkpoint. Reads only manifests.
// Throws Error if it has some and none is complete, so that no training begins anew beside them. Any thread.
std::optional<std::string> latest(const std::string& folder);

// What a save took.
struct SaveReport {
  int64_t bytes = 0;                // written
  double seconds = 0;               // from the call to the complete checkpoint
  double caller_seconds = 0;        // how long save_checkpoint kept its caller
  double longest_wait_seconds = 0;  // of an update for the disk
  double waited_seconds = 0;        // all of these together
  int64_t held_bytes = 0;           // the most memory beside the state itself
};

// -- for saves --

// run_folder(), with others to tell.
using Tell = std::function<void(const std::string& line)>;
std::shared_ptr<files::RunFolder> run_folder(const std::string& folder, const Tell& tell);
// A folder's absolute path without links, the same before the folder is made and after.
std::string real_path(const std::string& folder);
// Notes the last save into a run's folder, given by its real path. The save is over when `over` fires.
void note_save(const std::string& path, std::shared_ptr<device::Event> over);
// Waits for the last save of this process into a run's folder, which is given by itself or by a checkpoint in it.
void wait_for_saves(const std::string& folder);
// Waits for the last saves into all of them, as a process does when it ends. Interruptible.
void wait_for_all_saves();

}  // namespace roundpipe
