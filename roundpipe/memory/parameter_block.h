#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/event_list.h>
#include <roundpipe/memory/block_layout.h>
#include <roundpipe/memory/buffer_pool.h>

namespace roundpipe::memory {

struct NamedTensor {
  std::string name;
  at::Tensor tensor;
};

// The weights of one block after one number of updates.
struct WeightVersion {
  // Fires when the weights are complete; fails when they never will be.
  const device::EventPtr published = device::make_event();
  // uint8, the block's layout; set before `published` fires, dropped when the version is given up and nothing that
  // was submitted reads it any more.
  at::Tensor flat;
  // In place of `flat`, set as that is: the parameters one by one, where they lie in mapped files.
  std::vector<at::Tensor> parts;
  // Caller's thread only: uploads that have been submitted, and whether others may follow.
  device::EventList readers;
  bool given_up = false;
};
using WeightVersionPtr = std::shared_ptr<WeightVersion>;

// Parameters that move together, flat on the host: the version that calls read and, while an asynchronous step is
// under way, the next one. Nothing is overwritten under a pending upload.
//
// There are two ways to make the next version, and one block uses one of them. A general optimizer's values are
// copied in (begin_publish, finish_publish). A fused one writes a version straight into memory that gradients have
// landed in (begin_update), so that weights and gradients together take two buffers.
//
// Parameters that are frozen and all lie in mapped files (see map_file) stay there: the block then takes no memory, and
// is read tensor by tensor.
//
// Ownership: the user's parameters become views of the current version.
// Thread safety: the caller's thread, except finish_publish (the optimizer's thread, once for each begin_publish, in
// order).
class ParameterBlock {
 public:
  // Copies the values of `parameters` and points them at the block, one by one, so host memory peaks at one
  // parameter more. REQUIRES: all on the CPU.
  ParameterBlock(std::vector<NamedTensor> parameters, bool pinned);

  const BlockLayout& layout() const { return layout_; }
  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  // Where weights, and gradients of the same layout, take their memory from.
  const std::shared_ptr<BufferPool>& buffers() const { return buffers_; }

  // The version that calls submitted now read.
  const WeightVersionPtr& current() const { return current_; }
  // An upload of `version` that is over when `uploaded` is complete.
  void add_reader(const WeightVersionPtr& version, device::EventPtr uploaded);

  // Makes room for the next version: calls submitted from now on read it. `in_place` reuses the current buffer.
  void begin_publish(bool in_place);
  // Waits for the last upload of what is in the buffer's place, copies `values` (one per parameter, any floating
  // dtype, host) into it and fires the published event.
  void finish_publish(const std::vector<at::Tensor>& values);

  struct Update {
    WeightVersionPtr before;  // the newest version, complete or still being made
    WeightVersionPtr after;   // its successor; whoever asked sets `flat` and fires or fails `published`
  };
  // Starts a fused update. Synchronous: calls submitted from now on read its result. Asynchronous: they read what the
  // update before made, and those after the next begin_update or settle read this one.
  Update begin_update(bool asynchronous);
  // Calls submitted from now on read the newest version. False when they did so already.
  bool settle();
  // Whether calls read the newest version, and it is complete.
  bool settled() const { return !next_ && current_->published->complete(); }

  // Points the user's parameters at the version that calls read; where that is not complete yet, at a single NaN
  // (integers: 0), so that a look at them shows it and keeps no memory. Never blocks.
  void repoint();
  // Whether the user's parameters hold values.
  bool shows_weights() const { return shown_.defined(); }

  // Puts parameters whose storage the user replaced (for example with `.data =`) back into the block, with the
  // user's values. Throws std::invalid_argument when a dtype, shape or device has changed. Waits for the current
  // version if there is such a parameter.
  void adopt_replaced();

  // Copies parameters out of mapped files as soon as one of them is trainable. Caller's thread; waits for nothing.
  void own_trainable();

 private:
  struct Publication {
    WeightVersionPtr version;
    at::Tensor flat;  // undefined: takes a buffer
    std::vector<device::EventPtr> readers;
  };
  // No call will read `version` any more; its buffer is free once those that do are through and `successor` is made.
  static void give_up(const WeightVersionPtr& version, const WeightVersionPtr& successor);

  BlockLayout layout_;
  std::vector<NamedTensor> parameters_;
  std::shared_ptr<BufferPool> buffers_;
  WeightVersionPtr current_;
  WeightVersionPtr previous_;  // with begin_publish: calls may still be given to it, its buffer is the next one's
  WeightVersionPtr next_;      // of an asynchronous update
  at::Tensor shown_;           // what the user's parameters are views of; undefined: nothing
  std::mutex mutex_;
  std::deque<Publication> publications_;  // protected by mutex_: begun, not finished, oldest first
};

}  // namespace roundpipe::memory
