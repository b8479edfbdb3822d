#pragma once

#include <string>
#include <vector>

#include <roundpipe/cluster/shard_bytes.h>
#include <roundpipe/memory/gradient_block.h>
#include <roundpipe/optim/shards.h>

namespace roundpipe::cluster {

class Nodes;

// The shards of one block, the same on every node, and where those of its trained parameters lie. They are cut over all
// parameters, so that another optimizer, which trains others, finds the masters that this one leaves in their places.
struct BlockShards {
  optim::Shards elements;
  ShardBytes weights;
  ShardBytes gradients;
};
BlockShards shard_block(const memory::BlockLayout& weights, const memory::BlockLayout& gradients,
                        const std::vector<char>& trained, int nodes);

// One block in one step, for the other nodes to compare with theirs.
struct Turn {
  uint64_t step = 0;   // of this optimizer, from 1
  uint64_t block = 0;  // counted over all models
  std::string name;    // for messages: "the gradients of layer 3 of Llama in step 7"
};

struct Exchanged {
  std::vector<int> failed;  // ranks whose own gradients could not be made; then nothing was exchanged
  // The sums, in `flat`'s elements of this node's shard; the others' are undefined values. `received`: for which
  // parameters any node had a gradient. No `flat` if no node had any.
  memory::GradientBlockPtr sums;
};

// Sends the gradients of each shard to its node and adds those of this node's: from all nodes in the order of their
// ranks, in fp32, a node without a gradient counting as zeros; then times `factor` and rounded once, to the dtype of
// the gradients. `own`: landed or failed; its memory is overwritten and becomes that of the sums, and `buffers` gives
// memory if it has none. Blocks; throws Error. On the thread of Link::kGradients.
Exchanged exchange_gradients(Nodes& nodes, const Turn& turn, const memory::GradientBlock& own,
                             const memory::BlockLayout& layout, const BlockShards& shards, float factor,
                             const memory::BufferPool& buffers);

// Fills `flat`, of which this node has written its shard, with the shards of the others; or sends only, without
// writing, if `fills` is false. `flat` undefined: this node failed, which all nodes then throw. Blocks; throws Error.
// On the thread of Link::kWeights.
void gather_weights(Nodes& nodes, const Turn& turn, const at::Tensor& flat, const BlockShards& shards, bool fills);

}  // namespace roundpipe::cluster
