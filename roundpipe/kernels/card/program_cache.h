#pragma once

#include <optional>
#include <string>

namespace roundpipe::kernels::card {

// Compiled programs in a folder, for later processes. A file there is whole or not there, and what is damaged or made
// for another key is not found. A folder that cannot be read or written is none, without an error.
// Thread safety: any thread, any number of processes.
class ProgramCache {
 public:
  // Empty: keeps nothing.
  explicit ProgramCache(std::string folder) : folder_(std::move(folder)) {}

  // The folder that the environment names: ROUNDPIPE_KERNEL_CACHE, where empty means none, else roundpipe/kernels in
  // XDG_CACHE_HOME or ~/.cache.
  static std::string folder_of_environment();

  // `key`: text with all that the program follows from.
  std::optional<std::string> find(const std::string& key) const;
  void keep(const std::string& key, const std::string& program) const;

 private:
  std::string path_of(const std::string& key) const;

  const std::string folder_;
};

}  // namespace roundpipe::kernels::card
