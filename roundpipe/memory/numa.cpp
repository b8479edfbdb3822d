#include <roundpipe/memory/numa.h>

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace roundpipe::memory {

std::vector<int> memory_nodes(const std::filesystem::path& root) {
  // The file lists ranges of nodes: "0-1,4".
  std::ifstream file(root / "has_memory");
  std::vector<int> nodes;
  int first = 0;
  while (file >> first) {
    int last = first;
    if (file.peek() == '-') {
      file.ignore();
      if (!(file >> last)) break;
    }
    for (int node = first; node <= last; ++node) nodes.push_back(node);
    if (file.peek() != ',') break;
    file.ignore();
  }
  return nodes;
}

bool interleave(void* data, int64_t size_bytes, const std::vector<int>& nodes) {
  if (nodes.size() < 2) return false;
#ifdef SYS_mbind
  constexpr int kInterleave = 3;  // MPOL_INTERLEAVE of linux/mempolicy.h, which is not installed everywhere
  constexpr int kBits = std::numeric_limits<unsigned long>::digits;
  const int last = *std::max_element(nodes.begin(), nodes.end());
  std::vector<unsigned long> mask(static_cast<size_t>(last / kBits + 1));
  for (const int node : nodes) mask[static_cast<size_t>(node / kBits)] |= 1UL << (node % kBits);
  // The kernel reads one bit less than the given number.
  return syscall(SYS_mbind, data, static_cast<unsigned long>(size_bytes), kInterleave, mask.data(),
                 mask.size() * kBits + 1, 0) == 0;
#else
  return false;
#endif
}

}  // namespace roundpipe::memory
