#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/event_list.h>
#include <roundpipe/memory/block_layout.h>
#include <roundpipe/memory/buffer_pool.h>
#include <roundpipe/memory/named_tensor.h>

namespace roundpipe::memory {

// The weights of one block after one number of updates.
struct WeightVersion {
  // Fires when the weights are complete; fails if they never will be.
  const device::EventPtr published = device::make_event();
  // The weights: uint8, in the block's layout. Set before `published` fires. After an update has replaced the version,
  // dropped as soon as the update is published and every submitted upload of the version is complete.
  at::Tensor flat;
  // Set instead of `flat` for parameters in mapped files: one tensor per parameter.
  std::vector<at::Tensor> parts;
  // Caller's thread only: the uploads submitted so far, and whether no more will follow.
  device::EventList readers;
  bool retired = false;
};
using WeightVersionPtr = std::shared_ptr<WeightVersion>;

// Parameters that move together, flat on the host. Holds the version that calls read and, while an asynchronous step
// runs, the next one. Never overwrites memory that a pending upload reads.
//
// Every update makes one new version (begin_update). A general optimizer copies its values into it (copy_in). A fused
// optimizer writes it into memory in which gradients have landed, so that weights and gradients take two buffers.
//
// If all parameters are frozen and lie in mapped files (see map_file), they stay there: the block takes no memory, and
// devices read it tensor by tensor.
//
// Ownership: the user's parameters become views of the current version.
// Thread safety: the caller's thread, except copy_in (the optimizer's).
class ParameterBlock {
 public:
  // Copies the values of `parameters` and points them at the block, one by one, so that host memory peaks at one extra
  // parameter. Throws std::invalid_argument for a parameter that is not on the CPU.
  ParameterBlock(std::vector<NamedTensor> parameters, bool pinned);

  const BlockLayout& layout() const { return layout_; }
  const std::vector<NamedTensor>& parameters() const { return parameters_; }
  // The pool that gives memory to the weights and to gradients of the same layout.
  const std::shared_ptr<BufferPool>& buffers() const { return buffers_; }
  // From now on, `pool` gives that memory, and gets what the block has. REQUIRES: pieces of the same size; nothing is
  // under way. Caller's thread.
  void use_pool(const std::shared_ptr<BufferPool>& pool);

  // The version that a call reads if it is submitted now.
  const WeightVersionPtr& current() const { return current_; }
  // The version after the last update, complete or still being made.
  const WeightVersionPtr& newest() const { return next_ ? next_ : current_; }
  // Records an upload that reads `version` until `uploaded` is complete.
  void add_reader(const WeightVersionPtr& version, device::EventPtr uploaded);

  // The version that calls read if they are submitted after begin_update().
  enum class Reads {
    kBefore,         // `before`, until the next begin_update or settle: an asynchronous update
    kAfter,          // `after`; `before` is retired
    kAfterAndGraphs  // `after`; `before` is retired by the next update, since graphs made earlier may read it
  };
  struct Update {
    WeightVersionPtr before;  // the newest version, complete or still being made
    WeightVersionPtr after;   // its successor; the maker sets `flat` and fires or fails `published`
    // The memory of the version that is retired, for `after`: may be written once `reads` are complete. Undefined:
    // there is none.
    at::Tensor spare;
    std::vector<device::EventPtr> reads;
  };
  // Starts the update to the next version. An update begins when the one before has been made, or is a fused one.
  Update begin_update(Reads reads);
  // Makes the new version of `update` from `values`, one host tensor per parameter, of any floating dtype. Waits for
  // uploads from the memory that it overwrites.
  void copy_in(Update& update, const std::vector<at::Tensor>& values) const;
  // Makes calls submitted from now on read the newest version. Returns false if they did already.
  bool settle();
  // Whether calls read the newest version, and that version is complete.
  bool settled() const { return !next_ && current_->published->complete(); }

  // Points the user's parameters at the version that calls read. If that version is not complete yet, or has failed,
  // points them at a single NaN (integers: 0), so that they visibly have no values and keep no memory. Never blocks.
  void repoint();
  // Points the user's parameters at the newest version, if that is complete. What the user writes then is in it.
  void show_newest();
  bool shows_newest() const {
    if (!current_->parts.empty()) return true;
    // Until it is complete, another thread may be making it.
    return shown_.defined() && newest()->published->complete() && newest()->flat.defined() &&
           shown_.is_alias_of(newest()->flat);
  }
  // Whether the user's parameters hold values.
  bool shows_weights() const { return shown_.defined() || !current_->parts.empty(); }

  // If the user has pointed a parameter elsewhere (for example with `.data =`, also at the memory of another parameter
  // of `blocks`), copies the user's values into the version that calls read and into the newest one, and points the
  // parameter at its block's memory again, as the block's others. Comes before everything that points parameters
  // elsewhere. Waits for both versions, and for uploads, if there is such a parameter. Throws std::invalid_argument,
  // having changed no value, if a dtype, shape or device has changed.
  static void adopt_replaced(const std::vector<ParameterBlock*>& blocks);
  // Whether what the user has last written to a parameter is in the newest version. REQUIRES: adopt_replaced() came
  // after the write.
  bool newest_has(size_t index) const;

  // Another block has the user's parameters from now on: this one leaves them as they are. Any thread.
  void let_parameters_go() { has_parameters_.store(false); }

  // Copies the parameters out of mapped files if one of them has become trainable. Caller's thread; never waits.
  void own_trainable();

 private:
  // Whether a parameter is what this block has pointed it at.
  bool points_here(size_t index) const;
  // The parameters of which that is not so. Throws what adopt_replaced() does.
  std::vector<size_t> replaced() const;
  // REQUIRES: the version that calls read and the newest one are complete.
  void adopt(const std::vector<size_t>& indices);
  // No call reads `version` from now on. Drops its buffer when its uploads and `successor` are complete.
  static void retire(const WeightVersionPtr& version, const WeightVersionPtr& successor, Update* update);

  BlockLayout layout_;
  std::vector<NamedTensor> parameters_;
  std::shared_ptr<BufferPool> buffers_;
  WeightVersionPtr current_;
  WeightVersionPtr previous_;     // the version before, if graphs may read it
  WeightVersionPtr next_;         // of an asynchronous update
  std::vector<int64_t> adopted_;  // by parameter: the version of the tensor that adopt_replaced() left; or empty
  at::Tensor shown_;              // the tensor that the user's parameters are views of; undefined: they have no values
  std::atomic<bool> has_parameters_{true};
};

}  // namespace roundpipe::memory
