#include <roundpipe/optim/block_optimizer.h>

#include <algorithm>
#include <cstring>

#include <roundpipe/core/error.h>
#include <roundpipe/memory/host_arena.h>

namespace roundpipe::optim {

using memory::BlockLayout;
using memory::GradientBlock;

std::optional<c10::ScalarType> remainder_dtype(c10::ScalarType weights) {
  if (weights == at::kBFloat16) return at::kShort;
  if (weights == at::kHalf) return at::kFloat;
  return std::nullopt;
}

BlockOptimizer::BlockOptimizer(const memory::ParameterBlock& block, std::vector<int> groups,
                               std::vector<at::Tensor>& remainders, Algorithm algorithm, MomentFormat format)
    : layout_(block.layout()),
      groups_(std::move(groups)),
      remainders_(remainders),
      algorithm_(algorithm),
      format_(format),
      states_(layout_.tensors.size()) {
  for (size_t i = 0; i < groups_.size(); ++i) {
    const c10::ScalarType dtype = layout_.tensors[i].dtype;
    if (groups_[i] >= 0 && dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) {
      throw std::invalid_argument(
          concat("[optim] parameter '", block.parameters()[i].name, "' is ", c10::toString(dtype),
                 ", expected float32, bfloat16 or float16; convert the model, or step it with a "
                 "torch.optim optimizer over model.optim_parameters()"));
    }
  }
  remainders_.resize(layout_.tensors.size());
  for (size_t i = 0; i < groups_.size(); ++i) {
    const memory::TensorLayout& tensor = layout_.tensors[i];
    const std::optional<c10::ScalarType> dtype = remainder_dtype(tensor.dtype);
    if (groups_[i] < 0 || remainders_[i].defined() || !dtype) continue;
    remainders_[i] = memory::empty_strided(memory::HostArena::pageable(), tensor.sizes, tensor.strides, *dtype);
    restart_master(i, layout_.view(block.current()->flat, i));
  }
}

bool BlockOptimizer::trains_any() const {
  return std::any_of(groups_.begin(), groups_.end(), [](int group) { return group >= 0; });
}

void BlockOptimizer::restart_master(size_t index, const at::Tensor& weights) {
  at::Tensor& remainder = remainders_[index];
  if (!remainder.defined()) return;
  if (remainder.scalar_type() == at::kFloat) {
    remainder.copy_(weights);
  } else {
    remainder.zero_();
  }
}

void BlockOptimizer::update(const at::Tensor& before, const at::Tensor& after, const GradientBlock& gradients,
                            const BlockLayout& gradient_layout, const std::vector<Hyperparameters>& groups,
                            const GradientScaling& scaling, ThreadPool& pool) {
  for (size_t i = 0; i < groups_.size(); ++i) {
    const at::Tensor gradient = memory::gradient(gradients, gradient_layout, i);
    if (groups_[i] < 0 || !gradient.defined()) {
      const memory::TensorLayout& tensor = layout_.tensors[i];
      std::memcpy(after.mutable_data_ptr<uint8_t>() + tensor.offset_bytes,
                  before.const_data_ptr<uint8_t>() + tensor.offset_bytes, static_cast<size_t>(tensor.size_bytes));
      continue;
    }
    const Hyperparameters& hyper = groups[static_cast<size_t>(groups_[i])];
    Weights weights{layout_.view(before, i), layout_.view(after, i), {}, {}};
    if (remainders_[i].defined())
      (remainders_[i].scalar_type() == at::kFloat ? weights.master : weights.remainder) = remainders_[i];
    if (states_[i].tensors.empty() && states_[i].scalars.step == 0) {
      states_[i] = make_state(algorithm_, hyper, format_, weights.before);
    }
    optim::update(algorithm_, hyper, format_, states_[i], weights, gradient, scaling, pool);
  }
}

double BlockOptimizer::sum_of_squares(const GradientBlock& gradients, const BlockLayout& gradient_layout,
                                      float inverse_scale, ThreadPool& pool) const {
  double sum = 0;
  for (size_t i = 0; i < groups_.size(); ++i) {
    const at::Tensor gradient = memory::gradient(gradients, gradient_layout, i);
    if (groups_[i] >= 0 && gradient.defined()) sum += optim::sum_of_squares(gradient, inverse_scale, pool);
  }
  return sum;
}

int64_t BlockOptimizer::moment_bytes(const std::vector<Hyperparameters>& groups) const {
  int64_t bytes = 0;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i] < 0) continue;
    bytes += state_bytes(algorithm_, groups[static_cast<size_t>(groups_[i])], format_, layout_.tensors[i].sizes);
  }
  return bytes;
}

int64_t BlockOptimizer::remainder_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& remainder : remainders_)
    bytes += remainder.defined() ? static_cast<int64_t>(remainder.nbytes()) : 0;
  return bytes;
}

}  // namespace roundpipe::optim
