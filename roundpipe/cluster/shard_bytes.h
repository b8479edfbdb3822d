#pragma once

#include <cstdint>
#include <vector>

#include <roundpipe/memory/block_layout.h>
#include <roundpipe/optim/shards.h>

namespace roundpipe::cluster {

// Where the shards of a block lie in its memory. Parameters that nobody trains lie between runs, and never travel.
struct ShardBytes {
  // One stretch of memory whose parameters are all trained: shard s has the bytes [bounds[s], bounds[s + 1]).
  struct Run {
    size_t first_parameter = 0;
    size_t last_parameter = 0;  // exclusive
    std::vector<int64_t> bounds;
    int64_t shard_bytes(size_t shard) const { return bounds[shard + 1] - bounds[shard]; }
    int64_t largest_bytes() const;
  };
  std::vector<Run> runs;
};

// `layout`: of the weights or of the gradients. `trained`: for each parameter.
ShardBytes locate_shards(const memory::BlockLayout& layout, const optim::Shards& shards,
                         const std::vector<char>& trained);

}  // namespace roundpipe::cluster
