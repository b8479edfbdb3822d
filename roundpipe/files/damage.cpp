#include <roundpipe/files/damage.h>

#include <filesystem>
#include <set>
#include <system_error>

#include <roundpipe/core/mutex.h>

namespace roundpipe::files {
namespace {

// Never destroyed: saves may run while the process ends.
struct Known {
  Mutex mutex;
  std::set<std::string> folders ROUNDPIPE_GUARDED_BY(mutex);
};
Known& known() {
  static auto* const instance = new Known;
  return *instance;
}

std::string real_path(const std::string& folder) {
  std::error_code error;
  const std::filesystem::path path = std::filesystem::weakly_canonical(folder, error);
  return error ? folder : (path.has_filename() ? path : path.parent_path()).string();
}

}  // namespace

void note_damaged(const std::string& folder) {
  const std::string path = real_path(folder);
  const MutexLock lock(known().mutex);
  known().folders.insert(path);
}

bool is_known_damaged(const std::string& folder) {
  const std::string path = real_path(folder);
  const MutexLock lock(known().mutex);
  return known().folders.contains(path);
}

void forget_damaged(const std::string& folder) {
  const std::string path = real_path(folder);
  const MutexLock lock(known().mutex);
  known().folders.erase(path);
}

}  // namespace roundpipe::files
