#include <roundpipe/memory/host_room.h>

#include <unistd.h>

#include <fstream>
#include <limits>
#include <string>

#include <roundpipe/memory/host_arena.h>

namespace roundpipe::memory {

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

int64_t resident_bytes() {
  std::ifstream pages("/proc/self/statm");
  int64_t all = 0, resident = 0;
  return pages >> all >> resident ? resident * sysconf(_SC_PAGESIZE) : 0;
}

int64_t room_for_values() {
  constexpr int64_t kReserve = 20;
  int64_t bytes = free_host_bytes();
  for (const bool page_locked : {false, true}) bytes += HostArena::values(page_locked).stats().reserved_bytes;
  return bytes - bytes / kReserve;
}

}  // namespace roundpipe::memory
