#include <roundpipe/runs/host_memory.h>

#include <unistd.h>

#include <fstream>
#include <limits>
#include <string>

namespace roundpipe {

int64_t free_host_bytes() {
  std::ifstream lines("/proc/meminfo");
  std::string name;
  int64_t kib = 0;
  while (lines >> name >> kib) {
    if (name == "MemAvailable:") return kib * 1024;
    lines.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return int64_t{sysconf(_SC_AVPHYS_PAGES)} * sysconf(_SC_PAGESIZE);
}

}  // namespace roundpipe
