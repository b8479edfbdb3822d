#include <roundpipe/files/run_lock.h>

#include <unistd.h>

#include <array>
#include <utility>

#include <roundpipe/core/error.h>

#include "json_text.h"

namespace roundpipe::files {
namespace {

constexpr const char* kName = ".lock";
constexpr int64_t kMostHolder_bytes = 4096;

std::string this_process() {
  std::array<char, 256> host{};
  if (::gethostname(host.data(), host.size() - 1) != 0) host[0] = '\0';
  return concat("process ", ::getpid(), " on ", host[0] == '\0' ? "an unknown host" : host.data());
}

std::string holder_of(const std::string& path, FileSystem& files) {
  try {
    std::string text = files.read_small(path, kMostHolder_bytes);
    while (!text.empty() && text.back() == '\n') text.pop_back();
    if (text == this_process()) return "this process, which has opened it before";
    if (!text.empty()) return shown(text);
  } catch (const Error&) {  // the refusal is what matters
  }
  return "another process";
}

}  // namespace

RunLock::RunLock(std::string folder, FileSystem& files)
    : folder_(std::move(folder)), process_(::getpid()), file_(files.open_to_update(join(folder_, kName))) {
  if (!files.try_lock(file_)) {
    throw Error(concat("[checkpoint] ", folder_, " is in use by ", holder_of(file_.path(), files),
                       ", and a run folder has one writer; end that one first, or use another folder"));
  }
  try {
    const std::string line = this_process() + "\n";
    file_.truncate(0);
    file_.write(0, line.data(), static_cast<int64_t>(line.size()));
  } catch (const Error&) {  // a full disk: the lock holds without the name
  }
}

bool RunLock::is_of_this_process() const { return process_ == ::getpid(); }

void RunLock::require_own_process() const {
  if (is_of_this_process()) return;
  throw Error(
      concat("[checkpoint] this process was made by fork, and only its parent may write in ", folder_, "; save there"));
}

}  // namespace roundpipe::files
