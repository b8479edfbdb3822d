#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <roundpipe/schedule/range.h>

namespace roundpipe::schedule {

// Cuts layers [0, cost.size()) into consecutive, non-empty stages so that the largest stage cost is smallest; among
// those, the smallest sum of squares; among those, larger stages come last. Exact: O(stages * layers^2).
//
// Gives min(stages, layers) stages, or more where `max_stage_bytes` (0 = no cap) asks for more.
// Throws std::invalid_argument for a cost that is negative or not finite, and for a layer over the cap.
// REQUIRES: `bytes` is empty or has one entry a layer; a cap needs bytes.
std::vector<Range> balanced_partition(std::span<const double> cost, int stages,
                                      std::span<const std::int64_t> bytes = {}, std::int64_t max_stage_bytes = 0);

// The fewest stages with no stage above `max_stage_cost` or `max_stage_bytes`. A layer above `max_stage_cost` gets a
// stage of its own; arguments and errors otherwise as above.
int fewest_stages(std::span<const double> cost, double max_stage_cost, std::span<const std::int64_t> bytes = {},
                  std::int64_t max_stage_bytes = 0);

}  // namespace roundpipe::schedule
