#pragma once

#include <compare>
#include <map>
#include <optional>
#include <tuple>
#include <vector>

#include <roundpipe/schedule/cut_moves.h>

namespace roundpipe::simulate {

// A cut of even stages that visits each layer before the fused ones once in each direction. Single layers may come
// before the even stages of the forward and after those of the backward, which fills and drains the devices sooner.
struct Even {
  int forward = 0, backward = 0;  // even stages
  int first = 0, last = 0;        // single layers, first in the forward and last in the backward
  int fused = 1;                  // layers of the fused stage
  int head = 1;                   // devices that share it
  int interleave_percent = 100;

  auto operator<=>(const Even&) const = default;
};

// Even cuts of one kind: what all of them have in common. Each kind is searched by itself, so what is found of one does
// not depend on which others are allowed.
struct EvenKind {
  int fewest_fused = 1, most_fused = 1;
  int heads = 1;          // 1, or up to so many devices share the head, and at least two
  bool overlaps = false;  // an interleave above 1, else 1

  auto operator<=>(const EvenKind&) const = default;

  bool has(const Even& even) const;
};

// Makes even cuts of a model. `options` and `sums` must outlive it.
class EvenCuts {
 public:
  EvenCuts(const schedule::SearchOptions& options, const schedule::CostSums& sums, int devices,
           std::int64_t room_bytes);

  // Nothing if there is no such cut, if a stage does not fit the largest device, or if too much waits on the host.
  std::optional<schedule::Cut> cut_of(const Even& even);
  // Cuts of one kind with few and many stages.
  std::vector<Even> spread(const EvenKind& kind) const;
  // Cuts that differ little from this one, some of which may be impossible or of another kind.
  std::vector<Even> near(const Even& even, const EvenKind& kind) const;
  // Whether each stage fits the largest device.
  bool fits(const schedule::Cut& cut) const;
  // Whether no more waits on the host than the options allow.
  bool fits_host(const schedule::Cut& cut) const { return moves_.fits_host(cut); }

 private:
  std::vector<schedule::Range> stages_of(schedule::Range layers, bool backward, int stages);
  std::vector<int> stage_numbers(int layers, bool few) const;
  std::vector<int> fused_sizes(const EvenKind& kind) const;
  std::vector<int> singles(const EvenKind& kind) const;
  int end(int fused) const { return moves_.has_fused() ? sums_.layers() - fused : sums_.layers(); }
  int lowest(int fused) const;
  int backward_layers(int fused) const { return moves_.trains() ? end(fused) - lowest(fused) : 0; }

  const schedule::SearchOptions& options_;
  const schedule::CostSums& sums_;
  const int devices_;
  const std::int64_t room_bytes_;
  const schedule::CutMoves moves_;
  std::map<std::tuple<bool, int, int>, schedule::PartitionTable> tables_;
};

}  // namespace roundpipe::simulate
