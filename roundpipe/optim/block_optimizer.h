#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/memory/gradient_block.h>
#include <roundpipe/memory/parameter_block.h>
#include <roundpipe/optim/parameter_update.h>

namespace roundpipe::optim {

// What a fused optimizer keeps for the parameters of one block, and how it updates them.
// Thread safety: one thread at a time; between updates any.
class BlockOptimizer {
 public:
  // `groups`: for each parameter the group whose hyperparameters it follows, -1 where it is not trained.
  // `rest`: for each parameter what its fp32 master has beyond its weights, kept by the block's owner because it
  // belongs to the model: an int16 remainder for bf16, the master itself for fp16, undefined otherwise. Made here where
  // missing. Throws std::invalid_argument when a trained parameter is neither fp32 nor bf16 nor fp16.
  BlockOptimizer(const memory::ParameterBlock& block, std::vector<int> groups, std::vector<at::Tensor>& rest,
                 Algorithm algorithm, MomentFormat format);

  bool trains_any() const;
  int group(size_t parameter) const { return groups_[parameter]; }

  // Writes the version that follows from `before` and `gradients`, whose memory `after` may be, into `after` (both in
  // the block's layout; `gradients` in `gradient_layout`). A parameter without gradient keeps its weights and its
  // state. `groups`: hyperparameters of each group.
  void update(const at::Tensor& before, const at::Tensor& after, const memory::GradientBlock& gradients,
              const memory::BlockLayout& gradient_layout, const std::vector<Hyperparameters>& groups,
              const GradientScaling& scaling, ThreadPool& pool);

  // Of the trained parameters' gradients, see optim::sum_of_squares.
  double sum_of_squares(const memory::GradientBlock& gradients, const memory::BlockLayout& gradient_layout,
                        float inverse_scale, ThreadPool& pool) const;

  // The user has written into parameter `index`: its master is what is in `weights` now.
  void restart_master(size_t index, const at::Tensor& weights);

  // State of a parameter; no tensors before its first update.
  ParameterState& state(size_t parameter) { return states_[parameter]; }
  const at::Tensor& rest(size_t parameter) const { return rest_[parameter]; }

  // Host memory of the moments and of the rests, in bytes; the first as it will be once every parameter has had a step.
  int64_t moment_bytes(const std::vector<Hyperparameters>& groups) const;
  int64_t rest_bytes() const;

 private:
  const memory::BlockLayout& layout_;
  const std::vector<int> groups_;
  std::vector<at::Tensor>& rest_;
  const Algorithm algorithm_;
  const MomentFormat format_;
  std::vector<ParameterState> states_;
};

}  // namespace roundpipe::optim
