#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <roundpipe/schedule/range.h>

namespace roundpipe::schedule {

// Cuts layers [0, cost.size()) into consecutive, non-empty stages. Minimizes the largest stage cost, then the sum of
// squared stage costs; on a tie, larger stages come last. Exact: O(stages * layers^2).
//
// Makes min(stages, layers) stages, or more if `max_stage_bytes` (0 = no cap) requires more.
// `bytes` is empty or has one entry per layer; a cap needs it.
// Throws std::invalid_argument for `stages` below 1, no costs, a cost that is negative or not finite, bytes that do not
// match, and a layer over the cap.
std::vector<Range> balanced_partition(std::span<const double> cost, int stages,
                                      std::span<const std::int64_t> bytes = {}, std::int64_t max_stage_bytes = 0);

// Returns the smallest number of stages with no stage above `max_stage_cost` or `max_stage_bytes`. A layer above
// `max_stage_cost` gets a stage of its own. Arguments and errors are otherwise those of balanced_partition.
int fewest_stages(std::span<const double> cost, double max_stage_cost, std::span<const std::int64_t> bytes = {},
                  std::int64_t max_stage_bytes = 0);

}  // namespace roundpipe::schedule
