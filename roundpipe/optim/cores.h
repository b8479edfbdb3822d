#pragma once

#include <filesystem>
#include <vector>

namespace roundpipe::optim {

// The processors that this process may use, as the system numbers them, in ascending order. Never empty.
std::vector<int> usable_processors();

// How many physical cores `processors` belong to: two that share one count once. `root` is the folder in which the
// system describes them; a processor of which it says nothing counts as a core.
int physical_cores(const std::vector<int>& processors, const std::filesystem::path& root = "/sys/devices/system/cpu");

// How many threads update parameters when nobody says: the physical cores less one for each of the `device_threads`
// that feed a device, but at least half of them, and no more than 16 for each memory node. A core updates 39 GB of
// parameters and moments in a second, 19 with 8-bit moments (bench/optimizer.py), and the memory of a node moves 80 to
// 460 GB/s, so more threads would wait for it.
int default_threads(int physical_cores, int device_threads, int memory_nodes);

// Lets threads of a usual priority go before the calling one where cores are short. Best effort, and for good.
void lower_own_priority();

}  // namespace roundpipe::optim
