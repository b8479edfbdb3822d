#include <roundpipe/optim/block_optimizer.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include <c10/util/accumulate.h>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/files/file_system.h>
#include <roundpipe/memory/host_arena.h>

namespace roundpipe::optim {

using memory::BlockLayout;
using memory::GradientBlock;

BlockOptimizer::BlockOptimizer(const memory::ParameterBlock& block, std::vector<int> groups,
                               std::vector<at::Tensor>& remainders, Algorithm algorithm, StateFormat format,
                               std::vector<ElementRange> shard, size_t number)
    : layout_(block.layout()),
      groups_(std::move(groups)),
      remainders_(remainders),
      algorithm_(algorithm),
      format_(format),
      shard_(std::move(shard)),
      number_(number),
      states_(layout_.tensors.size()) {
  if (algorithm_ == Algorithm::kAdafactor && !shard_.empty()) {
    throw std::invalid_argument(
        "[optim] Adafactor is not for several nodes: its factors are those of whole parameters, and each node updates "
        "a part; use Adam, perhaps with 8-bit moments, or another optimizer");
  }
  if (algorithm_ == Algorithm::kMuon && !shard_.empty()) {
    throw std::invalid_argument(
        "[optim] Muon is not for several nodes: it steps whole matrices, and each node updates a part; use AdamW or "
        "another optimizer");
  }
  for (size_t i = 0; i < groups_.size(); ++i) {
    const c10::ScalarType dtype = layout_.tensors[i].dtype;
    if (groups_[i] >= 0 && dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) {
      throw std::invalid_argument(
          concat("[optim] parameter '", block.parameters()[i].name, "' is ", c10::toString(dtype),
                 ", expected float32, bfloat16 or float16; convert the model, or step it with one of torch's own "
                 "optimizers"));
    }
    if (groups_[i] >= 0) check_masters(format_.masters, dtype, block.parameters()[i].name);
  }
  remainders_.resize(layout_.tensors.size());
  for (size_t i = 0; i < groups_.size(); ++i) {
    const memory::TensorLayout& tensor = layout_.tensors[i];
    const std::optional<c10::ScalarType> dtype = remainder_dtype(tensor.dtype, format_.masters);
    if (groups_[i] >= 0 && remainders_[i].defined() && remainders_[i].numel() != this->shard(i).count()) {
      throw std::invalid_argument(concat("[optim] the fp32 master of '", block.parameters()[i].name,
                                         "' is divided over another number of nodes, expected the nodes of the "
                                         "model's first optimizer; make the model again"));
    }
    if (groups_[i] < 0 || !dtype || (remainders_[i].defined() && remainders_[i].scalar_type() == *dtype)) continue;
    const at::Tensor earlier = remainders_[i];
    remainders_[i] = shard_.empty()
                         ? memory::empty_strided(memory::HostArena::pageable(), tensor.sizes, tensor.strides, *dtype)
                         : memory::empty_strided(memory::HostArena::pageable(), {shard_[i].count()}, {1}, *dtype);
    if (earlier.defined()) {
      convert_remainder(earlier, remainders_[i]);
    } else {
      restart_master(i, layout_.view(block.current()->flat, i));
    }
  }
}

bool BlockOptimizer::trains_any() const {
  return std::any_of(groups_.begin(), groups_.end(), [](int group) { return group >= 0; });
}

ElementRange BlockOptimizer::shard(size_t parameter) const {
  if (!shard_.empty()) return shard_[parameter];
  return {0, c10::multiply_integers(layout_.tensors[parameter].sizes)};
}

at::Tensor BlockOptimizer::own(const at::Tensor& whole, size_t parameter) const {
  if (shard_.empty()) return whole;
  const ElementRange range = shard_[parameter];
  return whole.as_strided({range.count()}, {1}, whole.storage_offset() + range.first);
}

void BlockOptimizer::restart_master(size_t index, const at::Tensor& weights) {
  at::Tensor& remainder = remainders_[index];
  if (!remainder.defined()) return;
  if (remainder.scalar_type() == at::kFloat) {
    remainder.copy_(own(weights, index));
  } else {
    remainder.zero_();
  }
}

void BlockOptimizer::update(const at::Tensor& before, const at::Tensor& after, const GradientBlock& gradients,
                            const BlockLayout& gradient_layout, const std::vector<Hyperparameters>& groups,
                            const GradientScaling& scaling, ThreadPool& pool) {
  std::vector<size_t> fresh;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i] < 0 || (shard(i).count() == 0 && !shard_.empty()) || states_.has(i)) continue;
    if (memory::gradient(gradients, gradient_layout, i).defined()) fresh.push_back(i);
  }
  BlockStates::Hold states = states_.hold_to_change(fresh, [&](size_t i, const MakeTensor& make) {
    const Hyperparameters& hyper = groups[static_cast<size_t>(groups_[i])];
    return make_state(algorithm_, hyper, format_.moments, own(layout_.view(before, i), i), make);
  });
  for (size_t i = 0; i < groups_.size(); ++i) {
    const at::Tensor gradient = memory::gradient(gradients, gradient_layout, i);
    if (groups_[i] < 0 || !gradient.defined()) {
      const memory::TensorLayout& tensor = layout_.tensors[i];
      std::memcpy(after.mutable_data_ptr<uint8_t>() + tensor.offset_bytes,
                  before.const_data_ptr<uint8_t>() + tensor.offset_bytes, static_cast<size_t>(tensor.size_bytes));
      continue;
    }
    if (shard(i).count() == 0 && !shard_.empty()) continue;
    const Hyperparameters& hyper = groups[static_cast<size_t>(groups_[i])];
    Weights weights{own(layout_.view(before, i), i),           own(layout_.view(after, i), i), {}, {}, shard(i).first,
                    (static_cast<uint64_t>(number_) << 32) + i};
    if (remainders_[i].defined())
      (remainders_[i].scalar_type() == at::kFloat ? weights.master : weights.remainder) = remainders_[i];
    optim::update(algorithm_, hyper, format_.moments, states[i], weights, own(gradient, i), scaling, pool);
  }
}

std::vector<double> BlockOptimizer::sums_of_squares(const GradientBlock& gradients, const BlockLayout& gradient_layout,
                                                    float inverse_scale, ThreadPool& pool) const {
  std::vector<double> sums;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i] < 0) continue;
    const size_t begin = sums.size();
    sums.resize(begin + static_cast<size_t>(sum_parts(c10::multiply_integers(layout_.tensors[i].sizes))));
    const at::Tensor gradient = memory::gradient(gradients, gradient_layout, i);
    if (!gradient.defined() || shard(i).count() == 0) continue;
    const std::vector<double> parts = optim::sums_of_squares(own(gradient, i), inverse_scale, pool);
    std::copy(parts.begin(), parts.end(), sums.begin() + static_cast<int64_t>(begin) + shard(i).first / kShardGrain);
  }
  return sums;
}

size_t BlockOptimizer::terms() const {
  int64_t terms = 0;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i] >= 0) terms += sum_parts(c10::multiply_integers(layout_.tensors[i].sizes));
  }
  return static_cast<size_t>(terms);
}

double BlockOptimizer::total(const std::vector<double>& sums) const {
  double total = 0;
  auto part = sums.begin();
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i] < 0) continue;
    const auto end = part + sum_parts(c10::multiply_integers(layout_.tensors[i].sizes));
    total += std::accumulate(part, end, 0.0);
    part = end;
  }
  return total;
}

int64_t BlockOptimizer::moment_bytes(const std::vector<Hyperparameters>& groups) const {
  int64_t bytes = 0;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i] < 0) continue;
    bytes += state_bytes(algorithm_, groups[static_cast<size_t>(groups_[i])], format_.moments,
                         shard_.empty() ? layout_.tensors[i].sizes : std::vector{shard_[i].count()});
  }
  return bytes;
}

int64_t BlockOptimizer::stored_moment_bytes(const std::vector<Hyperparameters>& groups) const {
  size_t tensors = 0;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i] < 0) continue;
    tensors +=
        state_names(algorithm_, groups[static_cast<size_t>(groups_[i])], format_.moments, layout_.tensors[i].sizes)
            .size();
  }
  return align_up(moment_bytes(groups) + static_cast<int64_t>(tensors) * kBlockAlignment_bytes, files::kDirect_bytes);
}

int64_t BlockOptimizer::remainder_bytes() const {
  int64_t bytes = 0;
  for (const at::Tensor& remainder : remainders_)
    bytes += remainder.defined() ? static_cast<int64_t>(remainder.nbytes()) : 0;
  return bytes;
}

}  // namespace roundpipe::optim
