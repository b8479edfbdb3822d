#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace roundpipe::memory {

// The machine's nodes that have memory, as /sys/devices/system/node lists them; empty where it does not say.
// `root` is that folder.
std::vector<int> memory_nodes(const std::filesystem::path& root = "/sys/devices/system/node");

// Spreads the pages of [data, data + size_bytes), which begin at a page and were not touched yet, over `nodes` in turn:
// any device may read any block, so none should lie behind one node's memory. With fewer than two nodes nothing is
// done. False when nothing was done or the system refuses; the memory is as good as before then.
bool interleave(void* data, int64_t size_bytes, const std::vector<int>& nodes);

}  // namespace roundpipe::memory
