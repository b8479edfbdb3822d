#pragma once

#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include <roundpipe/files/file_system.h>

#include "../temporary_folder.h"

namespace roundpipe::files::test {

// Where tests sync many small files, which takes a real disk long: in memory, where the system has such a disk.
inline const std::filesystem::path kMemory =
    ::access("/dev/shm", W_OK) == 0 ? std::filesystem::path("/dev/shm") : std::filesystem::temp_directory_path();

using support::TemporaryFolder;

// The real file system, with faults. Set them before other threads use it.
class FaultyFiles : public FileSystem {
 public:
  using FileSystem::FileSystem;
  // Asked before each call, with its number from 0; returns the errno to fail with, or 0.
  std::function<int(Call, const std::string& path, int number)> fault;
  int64_t most_at_once = 0;  // of a read or write; 0 = no limit
  std::atomic<int> calls{0};

 protected:
  int before(Call call, const std::string& path, int64_t& bytes) override {
    if (most_at_once > 0 && bytes > most_at_once) bytes = most_at_once;
    const int number = calls++;
    return fault ? fault(call, path, number) : 0;
  }
};

inline std::string contents_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void write_file(const std::string& path, const std::string& contents) {
  std::ofstream(path, std::ios::binary) << contents;
}

// The message of what a call throws, of the type E.
template <typename E>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  }
  return "nothing was thrown";
}

// fork(), with nothing in the buffers of the output that both would print.
inline pid_t forked() {
  std::cout.flush();
  return ::fork();
}

inline bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace roundpipe::files::test
