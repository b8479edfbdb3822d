#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <roundpipe/kernels/card/program_cache.h>

#include "../temporary_folder.h"

namespace roundpipe::kernels::card {

namespace fs = std::filesystem;

namespace {

struct Folder : support::TemporaryFolder {
  std::vector<fs::path> files() const {
    std::vector<fs::path> all;
    for (const fs::directory_entry& entry : fs::recursive_directory_iterator(path())) {
      if (entry.is_regular_file()) all.push_back(entry.path());
    }
    return all;
  }
};

class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    const char* const before = std::getenv(name);
    had_ = before != nullptr;
    before_ = had_ ? before : "";
    set(value);
  }
  ~Variable() { set(had_ ? before_.c_str() : nullptr); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const char* value) const { value == nullptr ? unsetenv(name_) : setenv(name_, value, 1); }
  const char* const name_;
  bool had_;
  std::string before_;
};

std::string program_of(char letter, std::size_t bytes) { return std::string(bytes, letter) + '\0' + "\n"; }

}  // namespace

TEST_CASE("program cache: what was kept is found, by its key alone") {
  const Folder folder;
  const ProgramCache cache(folder / "a/b");
  CHECK_FALSE(cache.find("one"));
  cache.keep("one", program_of('x', 3000));
  cache.keep("two", program_of('y', 10));
  CHECK(cache.find("one") == program_of('x', 3000));
  CHECK(cache.find("two") == program_of('y', 10));
  CHECK_FALSE(cache.find("three"));
  cache.keep("one", "");
  CHECK(cache.find("one") == "");
  CHECK(folder.files().size() == 2);
}

TEST_CASE("program cache: a damaged file, or one of another key, is not found") {
  const Folder folder;
  const ProgramCache cache(folder.path());
  cache.keep("one", program_of('x', 100));
  const fs::path file = folder.files().at(0);
  const auto bytes = fs::file_size(file);
  for (std::uintmax_t at = 0; at < bytes; ++at) {
    {
      std::fstream changed(file, std::ios::in | std::ios::out | std::ios::binary);
      changed.seekg(static_cast<std::streamoff>(at));
      const int byte = changed.get();
      changed.seekp(static_cast<std::streamoff>(at));
      changed.put(static_cast<char>(byte ^ 1));
    }
    CHECK_FALSE(cache.find("one"));
    cache.keep("one", program_of('x', 100));
    CHECK(cache.find("one") == program_of('x', 100));
  }
  for (std::uintmax_t left = 0; left < bytes; ++left) {
    fs::resize_file(file, left);
    CHECK_FALSE(cache.find("one"));
    cache.keep("one", program_of('x', 100));
  }
}

TEST_CASE("program cache: many writers and readers, and no half file") {
  const Folder folder;
  const std::string program = program_of('x', 200000);
  std::vector<std::thread> threads;
  std::vector<int> wrong(4, 0);
  ProgramCache(folder.path()).keep("one", program);
  for (std::size_t i = 0; i < wrong.size(); ++i) {
    threads.emplace_back([&, i] {
      const ProgramCache cache(folder.path());
      for (int round = 0; round < 20; ++round) {
        cache.keep("one", program);
        wrong[i] += cache.find("one") != program;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(wrong == std::vector<int>(4, 0));
  CHECK(folder.files().size() == 1);
}

TEST_CASE("program cache: no folder, or one that cannot be made, keeps nothing and is no error") {
  const Folder folder;
  std::ofstream(folder / "file") << "x";
  for (const std::string& path : {std::string(), folder / "file/below"}) {
    const ProgramCache cache(path);
    cache.keep("one", "program");
    CHECK_FALSE(cache.find("one"));
  }
  CHECK(folder.files().size() == 1);
}

TEST_CASE("program cache: the folder that the environment names") {
  const Variable home("HOME", "/home/somebody");
  const auto folder = [](const char* own, const char* xdg) {
    const Variable a("ROUNDPIPE_KERNEL_CACHE", own), b("XDG_CACHE_HOME", xdg);
    return ProgramCache::folder_of_environment();
  };
  CHECK(folder("/here", "/there") == "/here");
  CHECK(folder("", "/there").empty());
  CHECK(folder(nullptr, "/there") == "/there/roundpipe/kernels");
  CHECK(folder(nullptr, "relative") == "/home/somebody/.cache/roundpipe/kernels");  // as its standard says
  CHECK(folder(nullptr, nullptr) == "/home/somebody/.cache/roundpipe/kernels");
  const Variable none("HOME", nullptr);
  CHECK(folder(nullptr, nullptr).empty());
}

}  // namespace roundpipe::kernels::card
