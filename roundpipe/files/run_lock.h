#pragma once

#include <sys/types.h>

#include <string>

#include <roundpipe/files/file_system.h>

namespace roundpipe::files {

// The right to write in a run folder: of one process, and there of one object. Held until the object or the process
// ends, however that ends; the file ".lock" stays and names the last holder.
// A child made by fork() does not have it. Thread safety: any thread.
class RunLock {
 public:
  // Throws Error that names the holder where there is one.
  RunLock(std::string folder, FileSystem& files);

  // False in a child of the process that took it.
  bool is_of_this_process() const;
  // Throws Error there.
  void require_own_process() const;

 private:
  const std::string folder_;
  const pid_t process_;
  File file_;
};

}  // namespace roundpipe::files
