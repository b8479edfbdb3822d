#pragma once

#include <optional>
#include <random>

#include <roundpipe/schedule/plan_choice.h>

namespace roundpipe::schedule {

// The forward of one cut with the backward of another: what is good at one end of a step hardly depends on the other.
// Nothing if their fused stages differ.
std::optional<Cut> crossed(const Cut& forward, const Cut& backward, PlanMode mode);

// Small random changes of cuts: a layer to the neighbour, a stage split or merged with the next, other replicas, other
// interleaving. `sums` must outlive it.
class CutMoves {
 public:
  static constexpr double kMostInterleave = 1.85;  // near 2, every step waits for the previous one

  CutMoves(const SearchOptions& options, const CostSums& sums, int devices);

  bool has_fused() const { return options_.plan.mode == PlanMode::kFused; }
  bool trains() const { return options_.plan.mode != PlanMode::kInference; }
  // Whether steps may overlap.
  bool overlaps() const { return options_.rules.asynchronous && options_.interleave && has_fused(); }
  // The most devices that can share a stage.
  int most_shared(Range layers, bool backward) const;
  // Whether no more waits on the host than the options allow.
  bool fits_host(const Cut& cut) const;
  // Whether a cut keeps to the options' replicas, interleaving and fused layers.
  bool allows(const Cut& cut) const;
  // Sets no stage's replicas above most_shared().
  void limit_replicas(Cut& cut) const;

  // Returns a cut that differs in one to three changes, or nothing if a change is impossible. The fused stage keeps its
  // layers. Memory and traffic are not considered.
  std::optional<Cut> neighbour(const Cut& from, std::mt19937& random) const;

 private:
  std::optional<Cut> moved(Cut cut, std::mt19937& random) const;

  const SearchOptions options_;
  const CostSums& sums_;
  const int devices_;
};

}  // namespace roundpipe::schedule
