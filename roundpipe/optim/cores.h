#pragma once

#include <filesystem>
#include <vector>

namespace roundpipe::optim {

// The system's numbers of the processors that this process may use, in ascending order. Never empty.
std::vector<int> usable_processors();

// The number of physical cores of `processors`: two processors of one core count once. `root` is the folder in which
// the system describes processors; one that has no description counts as a core.
int physical_cores(const std::vector<int>& processors, const std::filesystem::path& root = "/sys/devices/system/cpu");

// The default number of threads that update parameters: the physical cores minus the `device_threads` that feed a
// device, but at least half of the cores, and at most 16 per memory node. A core updates 39 GB/s of parameters and
// moments, 19 GB/s with 8-bit moments (bench/optimizer.py). A node's memory moves 80 to 460 GB/s, so more threads would
// wait for it.
int default_threads(int physical_cores, int device_threads, int memory_nodes);

// Lowers the calling thread's priority for good, so that normal threads go first when cores are short. Best effort.
void lower_own_priority();

}  // namespace roundpipe::optim
