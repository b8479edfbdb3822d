#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <roundpipe/core/mutex.h>
#include <roundpipe/files/file_system.h>
#include <roundpipe/files/output_file.h>

namespace roundpipe::files {

// The files of a checkpoint that one process writes, into the folder of a StepWriter: its own, or one that another
// process has made on a disk that both see. Removes nothing: the writer does. Thread safety: any thread.
class StepFiles {
 public:
  explicit StepFiles(std::string folder, FileSystem& files = FileSystem::real());
  StepFiles(const StepFiles&) = delete;
  StepFiles& operator=(const StepFiles&) = delete;

  const std::string& folder() const { return folder_; }

  // A new file of a final size. The reference lasts as long as this. Throws std::invalid_argument for a name that
  // is_file_name refuses, or that was given before.
  OutputFile& create(const std::string& name, int64_t bytes);
  // A file of these contents, finished.
  void add_small(const std::string& name, const std::string& contents);

  // Finishes the files that are not yet finished, and returns what they are, by name.
  std::vector<FileRecord> finish();
  // Makes their names durable.
  void sync_names() { files_.sync_folder(folder_); }
  // Closes the files, finished or not.
  void close();

 private:
  const std::string folder_;
  FileSystem& files_;
  Mutex mutex_;
  std::map<std::string, std::unique_ptr<OutputFile>> outputs_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::files
