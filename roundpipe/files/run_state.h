#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <utility>

#include <roundpipe/core/mutex.h>
#include <roundpipe/files/file_system.h>
#include <roundpipe/files/run_lock.h>

namespace roundpipe::files {

// What a run folder and its writers and journal share; the lock lasts as long as any of them.
struct RunState {
  RunState(std::string path, FileSystem& file_system)
      : folder(std::move(path)), files(file_system), lock(folder, files) {}

  const std::string folder;
  FileSystem& files;
  const RunLock lock;

  Mutex mutex;  // also held while a step takes its place, and while others are removed
  // Protected by mutex.
  std::set<int64_t> being_written ROUNDPIPE_GUARDED_BY(mutex);
  int64_t writers ROUNDPIPE_GUARDED_BY(mutex) = 0;  // made so far
  bool has_journal ROUNDPIPE_GUARDED_BY(mutex) = false;
};

}  // namespace roundpipe::files
