#pragma once

#include <memory>
#include <optional>
#include <string>

#include <roundpipe/checkpoint/run_folder.h>
#include <roundpipe/device/event.h>

namespace roundpipe {

// The folder of a run, which this process writes to: made if it is not there, and locked until the process ends. The
// same object for the same folder: save_checkpoint uses it, too, and open_journal() of it begins the run's journal.
// Thread safety: any thread. Throws Error if another process writes to the folder, or it cannot be written to. What was
// found in it is told by Frontend::warn, or printed to stderr.
std::shared_ptr<checkpoint::RunFolder> run_folder(const std::string& folder);

// The folder of the newest complete checkpoint of a run; none if the run has no checkpoint. Reads only manifests.
// Throws Error if it has some and none is complete, so that no training begins anew beside them. Any thread.
std::optional<std::string> latest(const std::string& folder);

// -- for saves --

// Notes the last save into a run's folder, which is over when `over` fires. The process waits for it when it ends.
void note_save(const checkpoint::RunFolder& run, device::EventPtr over);
// Waits for the last save of this process into a run's folder, which is given by itself or by a checkpoint in it.
void wait_for_saves(const std::string& folder);
// Frontend::warn, or stderr.
void tell_user(const std::string& notice);

}  // namespace roundpipe
