#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/memory/gradient_block.h>
#include <roundpipe/memory/parameter_block.h>
#include <roundpipe/optim/block_states.h>
#include <roundpipe/optim/masters.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/optim/shards.h>
#include <roundpipe/storage/disk_options.h>

namespace roundpipe::optim {

// The state that a fused optimizer keeps for the parameters of one block, and their update.
// Thread safety: any thread, one at a time.
class BlockOptimizer {
 public:
  // `groups`: for each parameter, the group whose hyperparameters it uses, or -1 if it is not trained. `remainders`:
  // those of the block, which take_masters() changes. Throws std::invalid_argument if a trained parameter is neither
  // fp32 nor bf16 nor fp16, or cannot have such masters. REQUIRES: `block` and `remainders` outlive the optimizer.
  // `shard`: for each parameter, the elements that are updated here while other processes update the others; empty: all
  // of them. Remainders and state then have those elements only, in one dimension. Not for Adafactor and Muon, which
  // step whole parameters: throws std::invalid_argument.
  // `number`: tells the block from others in what depends on chance, see random_key().
  BlockOptimizer(const memory::ParameterBlock& block, std::vector<int> groups, Remainders& remainders,
                 Algorithm algorithm, StateFormat format, std::vector<ElementRange> shard = {}, size_t number = 0);

  // From now on, the moments are in block `index` of `tier`; the masters as well, from take_masters() on, if `disk`
  // says so. REQUIRES: there is no state yet.
  void keep_on(std::shared_ptr<storage::DiskTier> tier, size_t index, DiskHolds holds);
  // Masters for what is trained, in the optimizer's format and place. Those that there are are converted and moved, the
  // others start from the weights. First copies what comes from a disk or goes to one, and changes nothing; throws
  // storage::Unreadable.
  void prepare_masters();
  // Then makes them the model's; an earlier optimizer must not be used any more. REQUIRES: prepare_masters().
  void take_masters();

  bool trains_any() const;
  size_t parameters() const { return groups_.size(); }
  int group(size_t parameter) const { return groups_[parameter]; }
  // The elements of a parameter that are updated here.
  ElementRange shard(size_t parameter) const;

  // Computes the next version from `before` and `gradients` and writes it to `after`, which may be the memory of the
  // gradients. `before` and `after` have the block's layout, `gradients` has `gradient_layout`. A parameter without a
  // gradient keeps its weights and its state. Of a shard, reads and writes its elements only. `groups`: the
  // hyperparameters of each group. First does what restart_masters() does. Throws storage::Unreadable, having changed
  // nothing.
  void update(const at::Tensor& before, const at::Tensor& after, const memory::GradientBlock& gradients,
              const memory::BlockLayout& gradient_layout, const std::vector<Hyperparameters>& groups,
              const GradientScaling& scaling, ThreadPool& pool);

  // The terms of optim::sum_of_squares over the gradients of the trained parameters, one after the other; those of
  // other shards, and of parameters without a gradient, are 0.
  std::vector<double> sums_of_squares(const memory::GradientBlock& gradients,
                                      const memory::BlockLayout& gradient_layout, float inverse_scale,
                                      ThreadPool& pool) const;
  // How many there are.
  size_t terms() const;
  // Their sum: first over the parts of each parameter, then over the parameters.
  double total(const std::vector<double>& sums) const;

  // The user has written to the parameter: its master has to start again.
  void note_written(size_t index) { written_[index] = true; }
  // No master has to: all have been replaced.
  void forget_written() { written_.assign(written_.size(), false); }
  // Restarts those masters from the weights. Throws storage::Unreadable; then they still have to.
  using WeightsOf = std::function<at::Tensor(size_t parameter)>;
  void restart_masters(const WeightsOf& weights);
  void restart_masters(const at::Tensor& block);

  BlockStates& states() { return *states_; }
  // Undefined: it has none. Without values if it is on a disk.
  const at::Tensor& remainder(size_t parameter) const { return remainders_.tensors[parameter]; }
  // With its values; `hold`: of states(). REQUIRES: no later optimizer has taken the masters.
  const at::Tensor& remainder(size_t parameter, BlockStates::Hold& hold) const;
  // With its values in any case: a copy, if it is on a disk. Throws storage::Unreadable.
  at::Tensor remainder_copy(size_t parameter) const;
  // Replaces it; `saved` may be in another format of the same master. Throws storage::Unreadable. REQUIRES: it has one.
  void set_remainder(size_t parameter, const at::Tensor& saved);

  // Bytes of the moments, once every trained parameter has had a step; of the remainders; and what of both is to be in
  // the block of a disk tier takes there at most.
  int64_t moment_bytes(const std::vector<Hyperparameters>& groups) const;
  int64_t remainder_bytes() const;
  int64_t stored_bytes(const std::vector<Hyperparameters>& groups, DiskHolds holds) const;

 private:
  const memory::ParameterBlock& block_;
  const memory::BlockLayout& layout_;
  const std::vector<int> groups_;
  Remainders& remainders_;
  const Algorithm algorithm_;
  const StateFormat format_;
  const std::vector<ElementRange> shard_;  // empty: all elements
  const size_t number_;
  const std::shared_ptr<BlockStates> states_;
  DiskHolds holds_ = DiskHolds::kMoments;  // if states_ is on a disk
  std::vector<at::Tensor> prepared_;       // the remainders that take_masters() takes
  std::vector<bool> written_;              // by the user, since its master was restarted

  // The shard's elements of a whole parameter or of something with its layout.
  at::Tensor own(const at::Tensor& whole, size_t parameter) const;
  // That the parameter is to have; none: it has none.
  std::optional<c10::ScalarType> wanted_remainder(size_t parameter) const;
  int64_t remainder_elements(size_t parameter) const;
  // A remainder by `make`, with the values that the model has of it; `earlier` has those on a disk.
  at::Tensor made_remainder(size_t parameter, const MakeTensor& make, BlockStates::Hold* earlier) const;
  // Where state `number` of states_ is the remainder of a parameter.
  size_t number_of(size_t parameter) const { return remainders_.tensors.size() + parameter; }
  // Writes the remainder of a master that is what the weights are.
  static void start(const at::Tensor& remainder, const at::Tensor& weights);
  // `hold`: to be changed; null: no remainder is there.
  void restart_masters(const WeightsOf& weights, BlockStates::Hold* hold);
  WeightsOf weights_in(const at::Tensor& block) const;
};

}  // namespace roundpipe::optim
