#pragma once

#include <map>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/mutex.h>
#include <roundpipe/memory/gradient_block.h>
#include <roundpipe/schedule/plan.h>

namespace roundpipe::runtime {

// The gradients of a parameter block over one call, added on the host from partial sums that devices have made, wide
// (16-bit gradients in fp32). Each layer that has the block (several: tied weights) has its own sum: those of its
// gradient groups, in group order. The layers' sums are added from the last layer to the first, then to the sum of
// earlier calls, and rounded once. So bits do not depend on the plan, nor on which jobs share a device.
//
// A part is what one job sends: the sum over one group or, if it begins with the first one, over several, which the
// device has added in the same order. Parts are added as soon as those before them are there.
// Thread safety: add from any thread; add_up on one thread at a time.
class BlockSum {
 public:
  struct Target {
    memory::GradientBlockPtr result;
    // The sum of earlier calls, or null; null also if a block belongs to one layer, whose first part begins with it.
    memory::GradientBlockPtr base;
    const memory::BlockLayout& layout;
    std::shared_ptr<memory::BufferPool> buffers;
    const memory::BlockLayout& wide;  // of the parts; if it has the dtypes of `layout`, the pools are the same
    std::shared_ptr<memory::BufferPool> wide_buffers;
  };
  // REQUIRES: the target's layouts outlive the sum.
  BlockSum(Target target, size_t layers, int groups);

  // Takes the part of `layer`, numbered among the layers that share the block, over `groups`: `flat` in the wide
  // layout, for each parameter whether it holds a gradient, and the room that it has, or null. Returns true if the
  // caller has to see to it that add_up() runs.
  bool add(size_t layer, schedule::Range groups, at::Tensor flat, std::vector<char> received,
           memory::GradientRoom::SharePtr share = nullptr);

  const Target& target() const { return target_; }
  // Adds the parts that are there on the threads that update parameters. With the last one, fires the result's
  // `landed`. REQUIRES: add() returned true, and the base has landed.
  void add_up();

 private:
  struct Part {
    int end = 0;  // of its groups
    at::Tensor flat;
    std::vector<char> received;
    memory::GradientRoom::SharePtr share;
  };
  // The parts of one layer that have not been added.
  struct Queue {
    int next = 0;                 // the first group of the part that is next
    std::map<int, Part> waiting;  // by first group
    bool is_ready() const { return waiting.contains(next); }
  };
  // Adds the parts that are there, in order. Returns whether they were the last ones.
  bool fold();
  void fold(Part& sum, Part part) const;
  bool received(size_t parameter) const;
  void combine_into(const at::Tensor& result, size_t parameter) const;

  const Target target_;
  const int groups_;
  std::vector<Part> sums_;  // [layer]; the thread in add_up()
  Mutex mutex_;
  std::vector<Queue> queues_ ROUNDPIPE_GUARDED_BY(mutex_);  // [layer]
  bool adding_ ROUNDPIPE_GUARDED_BY(mutex_) = false;        // whether somebody sees to add_up()
};

}  // namespace roundpipe::runtime
