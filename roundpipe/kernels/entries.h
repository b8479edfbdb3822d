#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace roundpipe::kernels {

// Threads of a card's block; kMostLanes of teams.inl.
inline constexpr int kBlockThreads = 256;

// How a card is asked to run a kernel: blocks of kBlockThreads threads, with this memory beside each one's cores.
struct Grid {
  std::int64_t blocks = 0;
  std::int64_t shared_bytes = 0;
};

// A kernel of list.inl, by its name in card_source(). `arguments` is its struct, with addresses of where it runs.
// Thread safety: any thread.
struct Entry {
  const char* name;
  const char* type;   // of the struct, in the source
  std::size_t bytes;  // of the struct
  Grid (*grid)(const void* arguments);
  // Runs all of it on the host, in torch's parallel threads, and returns when it is done.
  void (*run_on_host)(const void* arguments);
  // Replaces each address in the struct, null ones as well.
  void (*translate)(void* arguments, const std::function<void*(const void*)>& address);
};

// All of them, as list.inl has them.
const std::vector<const Entry*>& entries();

// The one that takes this struct.
template <typename Kernel>
const Entry& entry_of();

}  // namespace roundpipe::kernels
