#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <roundpipe/schedule/plan.h>

namespace roundpipe::schedule {

// Cuts consecutive layers into stages by dynamic programming: for each number of stages, the cut with the least sum of
// squared stage costs among those whose stages fit; on a tie, larger stages come last. Exact. Each number of stages
// costs O(layers^2) once.
class PartitionTable {
 public:
  // `prefix`: the prefix sums of the layers' costs, from 0. `first_that_fits`: by the number of layers before the end
  // of a stage, the first layer of the longest stage that fits and ends there; ascending. Layers count from
  // `first_layer`. `tolerance`: sums of squares that differ by less, relatively, are a tie.
  PartitionTable(int first_layer, std::vector<double> prefix, std::vector<int> first_that_fits, double tolerance = 0);

  // Returns the work done since the last call, in microbatch visits (see SearchOptions::effort).
  std::int64_t take_work() { return std::exchange(work_, 0); }

  // The stages, first layers first; empty if no partition into so many stages fits.
  std::vector<Range> cut(int stages);

 private:
  void extend(int stages);

  const int first_layer_;
  const std::vector<double> prefix_;
  const std::vector<int> first_that_fits_;
  const double tolerance_;
  std::vector<std::vector<double>> least_;  // [stages][end]
  std::vector<std::vector<int>> begins_;
  std::int64_t work_ = 0;
};

// Cuts layers [0, cost.size()) into consecutive, non-empty stages. Minimizes the largest stage cost, then the sum of
// squared stage costs, as a PartitionTable does. Exact: O(stages * layers^2).
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
