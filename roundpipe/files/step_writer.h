#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/files/file_system.h>
#include <roundpipe/files/manifest.h>
#include <roundpipe/files/output_file.h>
#include <roundpipe/files/run_state.h>
#include <roundpipe/files/step_files.h>

namespace roundpipe::files {

// A checkpoint that is being written, in a hidden folder beside its place. RunFolder::begin makes it.
// Thread safety: any thread; commit once, when no other call runs.
class StepWriter {
 public:
  // `replace`: a checkpoint of this step may be there, and stays until this one is complete. One that is incomplete, or
  // that this process has found damaged, may be there in any case.
  StepWriter(std::shared_ptr<RunState> run, int64_t step, bool replace);
  // Without a commit, everything written is removed.
  ~StepWriter();
  StepWriter(const StepWriter&) = delete;
  StepWriter& operator=(const StepWriter&) = delete;

  int64_t step() const { return step_; }
  // Where files are written until the commit; other processes may write more of them there.
  const std::string& folder() const { return files_->folder(); }

  // See StepFiles.
  OutputFile& create(const std::string& name, int64_t bytes);
  void add_small(const std::string& name, const std::string& contents);
  // Takes over finished files that another process has written into folder(). Throws Error, naming `whose` they are,
  // where one is not there with its size: then the folder is not the same for both.
  void adopt(const std::vector<FileRecord>& records, const std::string& whose);

  // Finishes the files that are not yet finished, writes the manifest, and moves the folder to its place. What is
  // there after that, survives a loss of power. Returns the manifest. `writer`, `nodes`: see Manifest.
  // Throws Error where anything fails. Then nothing of it is there, with one exception: when only the last sync failed,
  // the checkpoint is there and complete, but may be lost with the power; the Error says so.
  Manifest commit(const std::map<std::string, std::string>& writer = {}, int64_t nodes = 1);
  // Whether the checkpoint is complete and has its place, whatever commit() has thrown.
  bool placed() const { return placed_; }

 private:
  std::string aside(const char* why) const;
  void take_place();

  const std::shared_ptr<RunState> run_;
  const int64_t step_;
  const bool replace_;
  int64_t number_ = 0;  // of this writer, so that its folder is its own
  std::unique_ptr<StepFiles> files_;
  std::vector<FileRecord> adopted_;
  std::atomic<bool> placed_ = false;
};

// What the user is told of a save that has failed with `error` and that nobody waits for. `placed`: see StepWriter;
// unset in a process that does not know.
std::string failed_save_notice(int64_t step, const std::string& error, std::optional<bool> placed);

}  // namespace roundpipe::files
