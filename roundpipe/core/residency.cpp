#include <roundpipe/core/residency.h>

#include <algorithm>

namespace roundpipe {

int64_t slot_bytes(const WeightVisit& visit, const std::set<uint64_t>& residents) {
  int64_t bytes = visit.slot_bytes;
  for (const FrozenBlock& block : visit.frozen) bytes -= residents.contains(block.key) ? block.bytes : 0;
  return bytes;
}

int64_t pair_bytes(std::span<const WeightVisit> visits, const std::set<uint64_t>& residents) {
  if (visits.empty()) return 0;
  const int64_t first = slot_bytes(visits.front(), residents);
  int64_t before = slot_bytes(visits.back(), residents), most = 0;
  if (visits.size() == 1) return 2 * first;
  for (const WeightVisit& visit : visits) {
    const int64_t own = slot_bytes(visit, residents);
    most = std::max(most, before + own);
    before = own;
  }
  return most;
}

int64_t bytes_for_weights(const ResidentRoom& room) {
  constexpr int64_t kFreeShare = 16;
  return room.cap_bytes - room.cap_bytes / kFreeShare - room.work_bytes;
}

std::set<uint64_t> choose_residents(std::span<const WeightVisit> visits, std::span<const FrozenBlock> candidates,
                                    const ResidentRoom& room) {
  std::set<uint64_t> chosen;
  if (room.cap_bytes <= 0) return chosen;
  const int64_t usable_bytes = bytes_for_weights(room);
  int64_t bytes = 0;
  const auto admit = [&](const FrozenBlock& block) {
    if (room.most_bytes >= 0 && bytes + block.bytes > room.most_bytes) return false;
    if (!chosen.insert(block.key).second) return false;
    if (bytes + block.bytes + pair_bytes(visits, chosen) <= usable_bytes) {
      bytes += block.bytes;
      return true;
    }
    chosen.erase(block.key);
    return false;
  };
  // A block makes the arena smaller, too, so one that had no room may have it later.
  for (bool found = true; found;) {
    found = false;
    for (const FrozenBlock& block : candidates) found |= admit(block);
  }
  return chosen;
}

}  // namespace roundpipe
