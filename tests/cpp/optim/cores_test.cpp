#include <roundpipe/optim/cores.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <doctest/doctest.h>

#ifdef __linux__
#include <sys/resource.h>
#include <unistd.h>
#endif

using namespace roundpipe::optim;

namespace {

// A folder that describes processors as the system does; removed on destruction.
struct Described {
  std::filesystem::path root =
      std::filesystem::temp_directory_path() / ("roundpipe_cores_" + std::to_string(::getpid()));
  ~Described() { std::filesystem::remove_all(root); }

  void add(int processor, const std::string& siblings) const {
    const auto folder = root / ("cpu" + std::to_string(processor)) / "topology";
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "thread_siblings_list") << siblings << '\n';
  }
};

}  // namespace

TEST_CASE("cores: processors that share a core count once, and only those that may be used") {
  const Described described;
  for (const int core : {0, 1, 2}) {
    for (const int processor : {core, core + 3}) {
      described.add(processor, std::to_string(core) + "," + std::to_string(core + 3));
    }
  }
  CHECK(physical_cores({0, 1, 2, 3, 4, 5}, described.root) == 3);
  CHECK(physical_cores({0, 3}, described.root) == 1);
  CHECK(physical_cores({2, 3, 4}, described.root) == 3);
  CHECK(physical_cores({0, 3, 6, 7}, described.root) == 3);  // 6 and 7 are not described
  CHECK(physical_cores({0, 1}, described.root / "nowhere") == 2);
  const auto usable = usable_processors();
  REQUIRE(!usable.empty());
  CHECK(physical_cores(usable) >= 1);
  CHECK(physical_cores(usable) <= static_cast<int>(usable.size()));
}

TEST_CASE("cores: updates leave the devices' threads theirs, and do not crowd the memory") {
  CHECK(default_threads(16, 1, 1) == 15);
  CHECK(default_threads(16, 4, 1) == 12);
  CHECK(default_threads(16, 12, 1) == 8);  // half of them in any case
  CHECK(default_threads(2, 8, 1) == 1);
  CHECK(default_threads(1, 1, 0) == 1);
  CHECK(default_threads(3, 3, 1) == 2);
  CHECK(default_threads(64, 4, 1) == 16);
  CHECK(default_threads(64, 4, 2) == 32);
  CHECK(default_threads(8, 0, 1) == 8);
}

#ifdef __linux__
TEST_CASE("cores: a lower priority is the calling thread's alone") {
  const int before = getpriority(PRIO_PROCESS, 0);
  int lowered = before;
  std::thread([&] {
    lower_own_priority();
    lowered = getpriority(PRIO_PROCESS, static_cast<id_t>(gettid()));
  }).join();
  CHECK(lowered == std::max(before, 5));  // never higher than the program's own
  CHECK(getpriority(PRIO_PROCESS, 0) == before);
}
#endif
