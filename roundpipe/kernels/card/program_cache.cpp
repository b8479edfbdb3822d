#include <roundpipe/kernels/card/program_cache.h>

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iterator>
#include <sstream>

#include <roundpipe/core/error.h>
#include <roundpipe/core/fingerprint.h>

namespace roundpipe::kernels::card {
namespace {

namespace fs = std::filesystem;

std::string hex(const std::string& text) {
  return concat(std::hex, std::setw(16), std::setfill('0'), fingerprint(text.data(), text.size()));
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// What stands before a program in its file.
std::string header_of(const std::string& key, const std::string& program) { return key + "\n" + hex(program) + "\n"; }

}  // namespace

std::string ProgramCache::folder_of_environment() {
  if (std::getenv("ROUNDPIPE_KERNEL_CACHE") != nullptr) return variable("ROUNDPIPE_KERNEL_CACHE");
  fs::path folder = variable("XDG_CACHE_HOME");
  if (!folder.is_absolute()) {
    const std::string home = variable("HOME");
    if (home.empty()) return "";
    folder = fs::path(home) / ".cache";
  }
  return (folder / "roundpipe" / "kernels").string();
}

std::string ProgramCache::path_of(const std::string& key) const { return (fs::path(folder_) / hex(key)).string(); }

std::optional<std::string> ProgramCache::find(const std::string& key) const {
  if (folder_.empty()) return {};
  std::ifstream file(path_of(key), std::ios::binary);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const std::size_t header_bytes = header_of(key, "").size();
  if (text.size() < header_bytes) return {};
  std::string program = text.substr(header_bytes);
  if (!text.starts_with(header_of(key, program))) return {};
  return program;
}

void ProgramCache::keep(const std::string& key, const std::string& program) const {
  if (folder_.empty()) return;
  std::error_code error;
  fs::create_directories(folder_, error);
  std::string path = path_of(key) + ".XXXXXX";
  const int descriptor = mkstemp(path.data());
  if (descriptor < 0) return;
  close(descriptor);
  std::ofstream file(path, std::ios::binary);
  file << header_of(key, program) << program;
  file.close();
  if (file) fs::rename(path, path_of(key), error);
  fs::remove(path, error);  // if it was not renamed
}

}  // namespace roundpipe::kernels::card
