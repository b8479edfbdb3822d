#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/event.h>
#include <roundpipe/memory/block_layout.h>
#include <roundpipe/memory/buffer_pool.h>

namespace roundpipe::memory {

// The gradients of one parameter block on the host, as one call leaves them: what the call before had summed, plus
// this call's microbatches in order. Written once, before `landed` fires, immutable after, so that a failed call is
// undone by going back to the block of the call before.
struct GradientBlock {
  at::Tensor flat;             // uint8, in the layout of gradients; undefined when nothing was received
  std::vector<char> received;  // one per parameter: whether `flat` holds a gradient for it
  device::EventPtr landed = device::make_event();
};
using GradientBlockPtr = std::shared_ptr<GradientBlock>;

// Gradient `index` of the block, or undefined. REQUIRES: block.landed has fired.
at::Tensor gradient(const GradientBlock& block, const BlockLayout& layout, size_t index);

// Sums the parts of one call's gradient block that several jobs made (replicas of a stage over microbatch ranges),
// always in range order, so that bits do not depend on which device was first.
// Thread safety: add from any thread.
class RangeSum {
 public:
  RangeSum(GradientBlockPtr result, const BlockLayout& layout, size_t ranges);
  // Part `range` of the sum; the last one to arrive fires result->landed.
  void add(size_t range, at::Tensor flat, std::vector<char> received);

 private:
  struct Part {
    at::Tensor flat;
    std::vector<char> received;
  };
  const GradientBlockPtr result_;
  const BlockLayout& layout_;
  std::mutex mutex_;
  std::vector<Part> parts_;  // protected by mutex_
  size_t missing_;           // protected by mutex_
};

// Gradients of a parameter block that several layers share (tied weights). Every (layer, microbatch) contributes on
// its own, and they are folded as one backward pass over the whole model would: within a microbatch from the last
// layer to the first, then microbatches in order. 16-bit gradients of microbatches are summed in fp32 and rounded once.
// Thread safety: contribute from any thread.
class TiedSum {
 public:
  // `base` is what earlier calls had summed, or null; the sum is put into a piece of `buffers`. REQUIRES: contribute is
  // called once for each of layers x microbatches, after `base` has landed.
  TiedSum(GradientBlockPtr result, GradientBlockPtr base, const BlockLayout& layout,
          std::shared_ptr<BufferPool> buffers, size_t layers, size_t microbatches);
  // `gradients`: one host tensor per parameter, or undefined. `layer` counts the sharing layers from the first.
  void contribute(size_t layer, size_t microbatch, std::vector<at::Tensor> gradients);

 private:
  void start();
  void fold_microbatch(size_t microbatch);
  void finish();
  c10::ScalarType sum_dtype(size_t index) const;

  const GradientBlockPtr result_;
  const GradientBlockPtr base_;
  const BlockLayout& layout_;
  const std::shared_ptr<BufferPool> buffers_;
  const size_t layers_;
  std::mutex mutex_;
  // Protected by mutex_.
  std::vector<std::vector<std::vector<at::Tensor>>> contributions_;  // [microbatch][layer][parameter]
  std::vector<size_t> missing_;                                      // per microbatch
  std::vector<at::Tensor> sums_;                                     // per parameter; undefined = nothing came
  size_t next_ = 0;                                                  // first microbatch not folded yet
};

}  // namespace roundpipe::memory
