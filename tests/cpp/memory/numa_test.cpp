#include <roundpipe/memory/numa.h>

#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include <doctest/doctest.h>

using roundpipe::memory::interleave;
using roundpipe::memory::memory_nodes;

namespace {

// A folder with the given list of nodes.
class Root {
 public:
  explicit Root(const std::string& nodes) {
    std::filesystem::create_directories(path_);
    std::ofstream(path_ / "has_memory") << nodes;
  }
  ~Root() { std::filesystem::remove_all(path_); }
  const std::filesystem::path& path() const { return path_; }

 private:
  const std::filesystem::path path_ =
      std::filesystem::temp_directory_path() / ("roundpipe_numa_test." + std::to_string(getpid()));
};

// Returns the line of /proc/self/numa_maps for the mapping at `data`; empty if there is none.
std::string policy_of(const void* data) {
  std::ostringstream address;
  address << std::hex << reinterpret_cast<uintptr_t>(data);
  std::ifstream maps("/proc/self/numa_maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.starts_with(address.str())) return line;
  }
  return {};
}

}  // namespace

TEST_CASE("memory nodes: lists, ranges, and what cannot be read") {
  CHECK(memory_nodes(Root("0\n").path()) == std::vector<int>{0});
  CHECK(memory_nodes(Root("0-3\n").path()) == std::vector<int>{0, 1, 2, 3});
  CHECK(memory_nodes(Root("0,2-3,8\n").path()) == std::vector<int>{0, 2, 3, 8});
  CHECK(memory_nodes(Root("\n").path()).empty());
  CHECK(memory_nodes("/nonexistent").empty());
}

TEST_CASE("interleave: pages of a mapping take turns among the nodes, and nothing happens with one node") {
  constexpr size_t kSize = 1 << 20;
  void* const data = mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  REQUIRE(data != MAP_FAILED);
  CHECK_FALSE(interleave(data, kSize, {}));
  CHECK_FALSE(interleave(data, kSize, {0}));
  // The kernel ignores nodes that do not exist; some containers forbid the call.
  if (interleave(data, kSize, {0, 1})) {
    const std::string policy = policy_of(data);
    if (!policy.empty()) CHECK(policy.find("interleave") != std::string::npos);
  } else {
    MESSAGE("this machine does not let a process choose memory nodes");
  }
  CHECK_FALSE(interleave(static_cast<char*>(data) + 1, kSize, {0, 1}));  // refused: not a page
  static_cast<char*>(data)[kSize - 1] = 1;
  munmap(data, kSize);
}
