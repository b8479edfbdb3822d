#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/device/event.h>
#include <roundpipe/memory/block_layout.h>
#include <roundpipe/memory/buffer_pool.h>
#include <roundpipe/memory/gradient_room.h>

namespace roundpipe::memory {

// The gradients of one parameter block on the host after one call: the sums of earlier calls plus this call's
// microbatches, in order. Written once, before `landed` fires, and immutable afterwards, so that a failed call is
// undone by going back to the previous call's block.
struct GradientBlock {
  at::Tensor flat;             // uint8, in the layout of gradients; undefined if no gradient was received
  std::vector<char> received;  // one per parameter: whether `flat` holds a gradient for it
  device::EventPtr landed = device::make_event();
  GradientRoom::SharePtr share;  // set with `flat`, where gradients have limited room; then the step's, which ends it
};
using GradientBlockPtr = std::shared_ptr<GradientBlock>;

// Gradient `index` of the block, or undefined. REQUIRES: block.landed has fired.
at::Tensor gradient(const GradientBlock& block, const BlockLayout& layout, size_t index);

// Sums the gradients of a parameter block that several layers share (tied weights). Each (layer, microbatch)
// contributes separately. The contributions are added as one backward pass over the whole model would add them: within
// a microbatch from the last layer to the first, then microbatches in order. Each group of microbatches after the first
// one has a sum of its own, which is then added. 16-bit gradients of microbatches are summed in fp32 and rounded once.
// Thread safety: contribute from any thread.
class TiedSum {
 public:
  // `base` holds the sums of earlier calls, or is null. The sum goes into a piece of `buffers`. `group_ends`: where
  // each group ends, the last one at the number of microbatches. REQUIRES: contribute is called once for each of layers
  // x microbatches, after `base` has landed; `layout` outlives the sum.
  TiedSum(GradientBlockPtr result, GradientBlockPtr base, const BlockLayout& layout,
          std::shared_ptr<BufferPool> buffers, size_t layers, std::vector<size_t> group_ends);
  // `gradients`: one host tensor per parameter, undefined if there is no gradient. `layer` counts the sharing layers,
  // starting with the lowest.
  void contribute(size_t layer, size_t microbatch, std::vector<at::Tensor> gradients);

 private:
  void start() ROUNDPIPE_REQUIRES(mutex_);
  void fold_microbatch(size_t microbatch) ROUNDPIPE_REQUIRES(mutex_);
  void end_group() ROUNDPIPE_REQUIRES(mutex_);
  void finish() ROUNDPIPE_REQUIRES(mutex_);
  c10::ScalarType sum_dtype(size_t index) const;

  const GradientBlockPtr result_;
  const GradientBlockPtr base_;
  const BlockLayout& layout_;
  const std::shared_ptr<BufferPool> buffers_;
  const size_t layers_;
  const std::vector<size_t> group_ends_;
  Mutex mutex_;
  std::vector<std::vector<std::vector<at::Tensor>>> contributions_
      ROUNDPIPE_GUARDED_BY(mutex_);                              // [microbatch][layer][parameter]
  std::vector<size_t> missing_ ROUNDPIPE_GUARDED_BY(mutex_);     // per microbatch
  std::vector<at::Tensor> sums_ ROUNDPIPE_GUARDED_BY(mutex_);    // per parameter, of the group; undefined = no gradient
  std::vector<at::Tensor> totals_ ROUNDPIPE_GUARDED_BY(mutex_);  // the same, of the groups before
  size_t group_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;
  size_t next_ ROUNDPIPE_GUARDED_BY(mutex_) = 0;  // first microbatch not folded yet
};

}  // namespace roundpipe::memory
