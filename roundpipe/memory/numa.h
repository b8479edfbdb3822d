#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

namespace roundpipe::memory {

// The machine's NUMA nodes that have memory, as listed in `root`; empty if there is no such list.
std::vector<int> memory_nodes(const std::filesystem::path& root = "/sys/devices/system/node");

// Spreads the pages of [data, data + size_bytes) over `nodes` in turn: any device may read any block, so no block
// should depend on one node's memory. Returns false, with the memory unchanged, for fewer than two nodes and if the
// system refuses. REQUIRES: `data` is the start of a page, and no page was touched yet.
bool interleave(void* data, int64_t size_bytes, const std::vector<int>& nodes);

}  // namespace roundpipe::memory
