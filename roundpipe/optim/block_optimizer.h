#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/memory/gradient_block.h>
#include <roundpipe/memory/parameter_block.h>
#include <roundpipe/optim/block_states.h>
#include <roundpipe/optim/masters.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/optim/shards.h>

namespace roundpipe::optim {

// The state that a fused optimizer keeps for the parameters of one block, and their update.
// Thread safety: any thread, one at a time.
class BlockOptimizer {
 public:
  // `groups`: for each parameter, the group whose hyperparameters it uses, or -1 if it is not trained. `remainders`:
  // for each parameter, the part of its fp32 master that its weights lack, see remainder_dtype(); undefined if there is
  // none. It belongs to the model, so the block's owner keeps it; missing entries are made here, and those of another
  // format converted. Throws std::invalid_argument if a trained parameter is neither fp32 nor bf16 nor fp16, or cannot
  // have such masters. REQUIRES: `block` and `remainders` outlive the optimizer.
  // `shard`: for each parameter, the elements that are updated here while other processes update the others; empty: all
  // of them. Remainders and state then have those elements only, in one dimension. Not for Adafactor and Muon, which
  // step whole parameters: throws std::invalid_argument.
  // `number`: tells the block from others in what depends on chance, see random_key().
  BlockOptimizer(const memory::ParameterBlock& block, std::vector<int> groups, std::vector<at::Tensor>& remainders,
                 Algorithm algorithm, StateFormat format, std::vector<ElementRange> shard = {}, size_t number = 0);

  bool trains_any() const;
  size_t parameters() const { return groups_.size(); }
  int group(size_t parameter) const { return groups_[parameter]; }
  // The elements of a parameter that are updated here.
  ElementRange shard(size_t parameter) const;

  // Computes the next version from `before` and `gradients` and writes it to `after`, which may be the memory of the
  // gradients. `before` and `after` have the block's layout, `gradients` has `gradient_layout`. A parameter without a
  // gradient keeps its weights and its state. Of a shard, reads and writes its elements only. `groups`: the
  // hyperparameters of each group. Throws storage::Unreadable, having changed nothing.
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

  // Restarts the master of parameter `index` from `weights`, after the user has written to the parameter.
  void restart_master(size_t index, const at::Tensor& weights);

  BlockStates& states() { return states_; }
  const at::Tensor& remainder(size_t parameter) const { return remainders_[parameter]; }

  // Bytes of the moments, once every trained parameter has had a step; what they take at most as a block of a disk
  // tier; and of the remainders.
  int64_t moment_bytes(const std::vector<Hyperparameters>& groups) const;
  int64_t stored_moment_bytes(const std::vector<Hyperparameters>& groups) const;
  int64_t remainder_bytes() const;

 private:
  const memory::BlockLayout& layout_;
  const std::vector<int> groups_;
  std::vector<at::Tensor>& remainders_;
  const Algorithm algorithm_;
  const StateFormat format_;
  const std::vector<ElementRange> shard_;  // empty: all elements
  const size_t number_;
  BlockStates states_;

  // The shard's elements of a whole parameter or of something with its layout.
  at::Tensor own(const at::Tensor& whole, size_t parameter) const;
};

}  // namespace roundpipe::optim
