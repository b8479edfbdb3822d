#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/memory/gradient_block.h>

namespace roundpipe::runtime {

// Gradients of a parameter block that several layers share (tied weights), summed layer by layer: each layer has one
// sum of its own over the call's microbatches, in their order and wide (16-bit gradients in fp32). When all are here,
// they are added from the last layer to the first, then to what earlier calls had summed, and rounded once. So bits do
// not depend on the plan, nor on which layers share a stage, a job or a device.
//
// The first microbatches of a layer come as a sum that a device has made. Where a plan divides a layer's microbatches
// among jobs, the others come one by one, and are added here.
// Thread safety: add and contribute from any thread.
class LayerSums {
 public:
  struct Target {
    memory::GradientBlockPtr result;
    memory::GradientBlockPtr base;  // what earlier calls had summed, or null
    const memory::BlockLayout& layout;
    std::shared_ptr<memory::BufferPool> buffers;
    memory::BlockLayout wide;  // of the sums; where it has the types of `layout`, the buffers are the same ones
    std::shared_ptr<memory::BufferPool> wide_buffers;
  };
  LayerSums(Target target, size_t layers, size_t microbatches);

  // The sum of `layer`, counted from the first that shares the block, over microbatches [0, count): `flat` in the wide
  // layout, and for which parameters it holds one. True for the call that completes all sums: combine() is next.
  bool add(size_t layer, size_t count, at::Tensor flat, std::vector<char> received);
  // One microbatch behind those: one host tensor per parameter, or undefined.
  bool contribute(size_t layer, size_t microbatch, std::vector<at::Tensor> gradients);

  const Target& target() const { return target_; }
  // Puts the sums together on the threads that update parameters, and fires the result's `landed`. REQUIRES: all sums
  // are complete, and the base has landed.
  void combine();

 private:
  struct Layer {
    at::Tensor flat;  // undefined until add()
    std::vector<char> received;
    size_t next = 0;                                    // microbatches that are in it
    std::map<size_t, std::vector<at::Tensor>> waiting;  // those that have come before an earlier one
  };
  // REQUIRES: mutex_ is held.
  bool fold(Layer& layer);
  // REQUIRES: mutex_ is held.
  bool received(size_t parameter) const;
  void combine_into(const at::Tensor& result, size_t parameter);

  const Target target_;
  const size_t microbatches_;
  std::mutex mutex_;
  std::vector<Layer> layers_;  // protected by mutex_
  size_t incomplete_;          // protected by mutex_
};

}  // namespace roundpipe::runtime
