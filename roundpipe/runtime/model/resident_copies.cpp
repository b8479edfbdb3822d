#include <roundpipe/runtime/model/resident_copies.h>

#include <algorithm>

namespace roundpipe::runtime {

void ResidentCopies::keep(const std::vector<int>& workers) {
  const MutexLock lock(mutex_);
  std::erase_if(copies_, [&](const auto& entry) { return std::ranges::count(workers, entry.first.first) == 0; });
}

}  // namespace roundpipe::runtime
