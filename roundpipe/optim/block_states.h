#pragma once

#include <functional>
#include <memory>
#include <vector>

#include <roundpipe/memory/block_layout.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/storage/disk_tier.h>

namespace roundpipe::optim {

// The state of a block's parameters between steps: in host memory, or one after the other in a block of a disk tier.
// After the states of all parameters come as many more, which lie beside them: see Remainders.
// Thread safety: of all but hold(), which any thread may call at any time, any thread, one at a time.
class BlockStates {
 public:
  explicit BlockStates(size_t parameters) : states_(2 * parameters), first_(2 * parameters, kNone) {}

  // From now on, the state is block `index` of `tier`. REQUIRES: there is no state yet.
  void keep_on(std::shared_ptr<storage::DiskTier> tier, size_t index);
  // Null: in host memory.
  const std::shared_ptr<storage::DiskTier>& tier() const { return tier_; }
  size_t index() const { return index_; }
  // An update that the tier expects has been made, or will not come.
  void update_is_over() noexcept;

  // The state of a parameter; it has no tensors before its first update. Of a state on the disk, they have no values.
  const ParameterState& operator[](size_t parameter) const { return states_[parameter]; }
  // Whether a parameter has a state.
  bool has(size_t parameter) const;
  // Replaces it; the tensors are copied only onto a disk.
  void set(size_t parameter, ParameterState state);
  // Forgets it.
  void forget(size_t parameter) { states_[parameter] = {}; }

  // The values, while it lives.
  class Hold {
   public:
    Hold(Hold&& other) noexcept;
    Hold& operator=(Hold&&) = delete;
    ~Hold();

    // To be changed only if it was taken by hold_to_change(). Changes of the tensors' shapes are lost.
    ParameterState& operator[](size_t parameter) { return (states_.empty() ? of_->states_ : states_)[parameter]; }

   private:
    friend class BlockStates;
    Hold(BlockStates& of, storage::DiskTier::Use use) : of_(&of), use_(use) {}

    BlockStates* of_;
    storage::DiskTier::Use use_;
    std::vector<ParameterState> states_;  // of one on the disk
  };
  // To be read. Waits until the state is in memory. Throws storage::Unreadable.
  Hold hold();
  // To be changed. First gives each of `fresh` the state that `make` makes, in place of any that it has. Throws
  // storage::Unreadable; then nothing has been changed.
  using Make = std::function<ParameterState(size_t parameter, const MakeTensor& tensor)>;
  Hold hold_to_change(const std::vector<size_t>& fresh = {}, const Make& make = {});

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);

  void bind(Hold& hold, const at::Tensor& flat) const;
  // Finds places for states of a parameter, those of earlier ones if they are alike.
  void place(size_t parameter, const std::vector<at::Tensor>& tensors);

  std::vector<ParameterState> states_;
  std::shared_ptr<storage::DiskTier> tier_;
  size_t index_ = 0;
  // Of a state on the disk: where the tensors are, and the first one's index there for each parameter.
  memory::BlockLayout layout_;
  std::vector<size_t> first_;
};

// What the fp32 masters of a block's parameters have beyond the weights, see remainder_dtype(). It is the model's, so
// that it outlives optimizers.
struct Remainders {
  std::vector<at::Tensor> tensors;       // of each parameter; undefined: none. Without values if they are on a disk
  std::shared_ptr<BlockStates> on_disk;  // then has them, that of parameter i as state `tensors.size() + i`; else null
};

}  // namespace roundpipe::optim
