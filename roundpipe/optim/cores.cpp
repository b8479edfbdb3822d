#include <roundpipe/optim/cores.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <string>
#include <thread>

#ifdef __linux__
#include <sched.h>
#include <sys/resource.h>
#include <unistd.h>
#endif

namespace roundpipe::optim {

std::vector<int> usable_processors() {
  std::vector<int> processors;
#ifdef __linux__
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int processor = 0; processor < CPU_SETSIZE; ++processor) {
      if (CPU_ISSET(processor, &set)) processors.push_back(processor);
    }
  }
#endif
  if (processors.empty()) {
    const int count = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
    for (int processor = 0; processor < count; ++processor) processors.push_back(processor);
  }
  return processors;
}

int physical_cores(const std::vector<int>& processors, const std::filesystem::path& root) {
  // All processors of a core have the same text in this file.
  std::set<std::string> cores;
  int unknown = 0;
  for (const int processor : processors) {
    std::ifstream file(root / ("cpu" + std::to_string(processor)) / "topology" / "thread_siblings_list");
    std::string siblings;
    if (std::getline(file, siblings) && !siblings.empty()) {
      cores.insert(siblings);
    } else {
      ++unknown;
    }
  }
  return static_cast<int>(cores.size()) + unknown;
}

int default_threads(int physical_cores, int device_threads, int memory_nodes) {
  constexpr int kUsefulThreads = 16;  // per memory node
  const int left = std::max(physical_cores - device_threads, (physical_cores + 1) / 2);
  return std::clamp(left, 1, kUsefulThreads * std::max(1, memory_nodes));
}

void lower_own_priority() {
#ifdef __linux__
  constexpr int kNice = 5;  // of 19; gives a third of a normal thread's share when both want a core
  const auto self = static_cast<id_t>(gettid());
  // Root may raise a priority as well, and the program may have a lower one already.
  if (getpriority(PRIO_PROCESS, self) < kNice) setpriority(PRIO_PROCESS, self, kNice);
#endif
}

}  // namespace roundpipe::optim
