#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace roundpipe::files {
class FileSystem;
}

namespace roundpipe {

// What of an optimizer's state a disk may hold.
enum class DiskHolds {
  kMoments,
  kMasters  // the moments, and what fp32 masters of 16-bit weights have beyond them
};
// Their names as options, in this order.
const std::vector<std::string>& disk_holds_names();
// Throws std::invalid_argument for another name.
DiskHolds parse_disk_holds(const std::string& name);

// What of an optimizer's state is on a disk, and how much host memory it still takes.
struct DiskOptions {
  // A folder on the disk that holds the state for which there is no memory; empty: all is in host memory. What is
  // written there is gone with the process: it is no checkpoint.
  std::string folder;
  // Host memory of what the disk may hold, at most; 0: the least with which the disk and the updates work side by side.
  int64_t memory_bytes = 0;
  // Masters there leave more memory free, and are read and written in each step as well.
  DiskHolds holds = DiskHolds::kMoments;
  // For tests of faults; null: that of the system. Outlives the optimizer.
  files::FileSystem* files = nullptr;

  bool is_on() const { return !folder.empty(); }
  // What the disk may hold, in words.
  const char* held() const { return holds == DiskHolds::kMasters ? "moments and masters" : "moments"; }
};

// Throws std::invalid_argument for options of a disk that is not there.
void check(const DiskOptions& disk);

}  // namespace roundpipe
