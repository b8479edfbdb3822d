#pragma once

#include <cstdint>
#include <set>
#include <span>
#include <vector>

namespace roundpipe {

// Which frozen weights stay on a device from job to job: the rule that the engine keeps and the simulators predict by.

// A block of weights that no job changes.
struct FrozenBlock {
  uint64_t key = 0;  // the same at each visit
  int64_t bytes = 0;
};

// One job of a device.
struct WeightVisit {
  int64_t slot_bytes = 0;           // of all its weights, if nothing is resident
  std::vector<FrozenBlock> frozen;  // of these; a block that several layers share has room for each of them in a slot
};

// Bytes that a job's slot takes beside these residents.
int64_t slot_bytes(const WeightVisit& visit, const std::set<uint64_t>& residents);

// Bytes of the largest two consecutive jobs together: what one arena takes that has room for the running job and the
// next. The last job is followed by the first one, of the next step.
int64_t pair_bytes(std::span<const WeightVisit> visits, const std::set<uint64_t>& residents);

struct ResidentRoom {
  int64_t cap_bytes = 0;    // of the device; 0: none is known, so nothing is resident
  int64_t work_bytes = 0;   // what jobs take beside weights
  int64_t most_bytes = -1;  // of residents, at most; below 0: any number
};

// Bytes under a cap for weights: residents and the arena.
int64_t bytes_for_weights(const ResidentRoom& room);

// Of `candidates`, which are tried in their order, those that are resident while the device makes `visits`: each that
// has room beside the ones before it, the arena that is needed then, and the work. One part in 16 of the cap stays
// free, for what no prediction knows. Those that find no room are tried again, as long as others have made the arena
// smaller.
std::set<uint64_t> choose_residents(std::span<const WeightVisit> visits, std::span<const FrozenBlock> candidates,
                                    const ResidentRoom& room);

}  // namespace roundpipe
