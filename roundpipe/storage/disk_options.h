#pragma once

#include <cstdint>
#include <string>

namespace roundpipe::files {
class FileSystem;
}

namespace roundpipe {

// What of an optimizer's state is on a disk, and how much host memory it still takes.
struct DiskOptions {
  // A folder on the disk that holds the moments for which there is no memory; empty: all are in host memory. What is
  // written there is gone with the process: it is no checkpoint.
  std::string folder;
  // Host memory of the moments, at most; 0: the least with which the disk and the updates work side by side.
  int64_t memory_bytes = 0;
  // For tests of faults; null: that of the system. Outlives the optimizer.
  files::FileSystem* files = nullptr;

  bool is_on() const { return !folder.empty(); }
};

}  // namespace roundpipe
