#pragma once

#include <cstdint>
#include <vector>

namespace roundpipe::optim {

// Elements of a tensor, counted in the order of its memory.
struct ElementRange {
  int64_t first = 0;
  int64_t last = 0;
  int64_t count() const { return last - first; }
  bool operator==(const ElementRange&) const = default;
};

// For each shard and each parameter, the elements that the shard holds; empty ranges where it holds none.
using Shards = std::vector<std::vector<ElementRange>>;

// Cuts parameters into so many shards of about equal size: consecutive elements, parameters in order. A parameter is
// cut only at multiples of kShardGrain, so that sums over its parts and 8-bit moments do not depend on the cuts.
// `elements`: the number of elements of each parameter; 0 for one that nobody holds. REQUIRES: shards >= 1.
Shards cut_into_shards(const std::vector<int64_t>& elements, int shards);

// The number of elements that are summed, and cut, together.
inline constexpr int64_t kShardGrain = 65536;

}  // namespace roundpipe::optim
