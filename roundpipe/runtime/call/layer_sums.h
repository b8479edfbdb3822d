#pragma once

#include <functional>
#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/memory/gradient_block.h>

namespace roundpipe::runtime {

// Gradients of a parameter block that several layers share (tied weights), summed layer by layer: each layer has its
// own sum over the call's microbatches, in their order and wide (16-bit gradients in fp32). When all are complete, they
// are added from the last layer to the first, then to the sum of earlier calls, and rounded once. So bits do not depend
// on the plan, nor on which layers share a stage, a job or a device.
//
// The first microbatches of a layer arrive as a sum made by a device. If a plan divides a layer's microbatches among
// jobs, the others arrive one by one, and are added here.
// Thread safety: add and contribute from any thread.
class LayerSums {
 public:
  struct Target {
    memory::GradientBlockPtr result;
    memory::GradientBlockPtr base;  // the sum of earlier calls, or null
    const memory::BlockLayout& layout;
    std::shared_ptr<memory::BufferPool> buffers;
    memory::BlockLayout wide;  // of the sums; if it has the dtypes of `layout`, the pools are the same
    std::shared_ptr<memory::BufferPool> wide_buffers;
  };
  LayerSums(Target target, size_t layers, size_t microbatches);

  // Takes the sum of `layer`, numbered among the layers that share the block, over microbatches [0, count): `flat` in
  // the wide layout, and for each parameter whether it holds a gradient. Returns true to the call that completes all
  // sums, which then runs combine().
  bool add(size_t layer, size_t count, at::Tensor flat, std::vector<char> received);
  // Takes one later microbatch: one host tensor per parameter, or undefined. Returns the same as add().
  bool contribute(size_t layer, size_t microbatch, std::vector<at::Tensor> gradients);

  const Target& target() const { return target_; }
  // Combines the sums on the threads that update parameters, and fires the result's `landed`. REQUIRES: all sums are
  // complete, and the base has landed.
  void combine();

 private:
  struct Layer {
    at::Tensor flat;  // undefined until add()
    std::vector<char> received;
    size_t next = 0;                                    // number of microbatches added
    std::map<size_t, std::vector<at::Tensor>> waiting;  // microbatches that arrived before an earlier one
  };
  bool fold(Layer& layer) ROUNDPIPE_REQUIRES(mutex_);
  bool received(size_t parameter) const ROUNDPIPE_REQUIRES(mutex_);
  void combine_into(const at::Tensor& result, size_t parameter) ROUNDPIPE_REQUIRES(mutex_);

  const Target target_;
  const size_t microbatches_;
  Mutex mutex_;
  std::vector<Layer> layers_ ROUNDPIPE_GUARDED_BY(mutex_);
  size_t incomplete_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace roundpipe::runtime
