#include <roundpipe/optim/block_optimizer.h>

#include <algorithm>
#include <cstring>
#include <numeric>

#include <ATen/core/grad_mode.h>
#include <c10/util/accumulate.h>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/files/file_system.h>
#include <roundpipe/memory/host_arena.h>

namespace roundpipe::optim {

using memory::BlockLayout;
using memory::GradientBlock;

BlockOptimizer::BlockOptimizer(const memory::ParameterBlock& block, std::vector<int> groups, Remainders& remainders,
                               Algorithm algorithm, StateFormat format, std::vector<ElementRange> shard, size_t number)
    : block_(block),
      layout_(block.layout()),
      groups_(std::move(groups)),
      remainders_(remainders),
      algorithm_(algorithm),
      format_(format),
      shard_(std::move(shard)),
      number_(number),
      states_(std::make_shared<BlockStates>(layout_.tensors.size())),
      written_(layout_.tensors.size(), false) {
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
  remainders_.tensors.resize(layout_.tensors.size());
  for (size_t i = 0; i < groups_.size(); ++i) {
    const at::Tensor& known = remainders_.tensors[i];
    if (groups_[i] < 0 || !known.defined() || known.numel() == this->shard(i).count()) continue;
    throw std::invalid_argument(concat("[optim] the fp32 master of '", block.parameters()[i].name,
                                       "' is divided over another number of nodes, expected the nodes of the "
                                       "model's first optimizer; make the model again"));
  }
}

void BlockOptimizer::keep_on(std::shared_ptr<storage::DiskTier> tier, size_t index, DiskHolds holds) {
  states_->keep_on(std::move(tier), index);
  holds_ = holds;
}

std::optional<c10::ScalarType> BlockOptimizer::wanted_remainder(size_t parameter) const {
  if (groups_[parameter] >= 0) return remainder_dtype(layout_.tensors[parameter].dtype, format_.masters);
  const at::Tensor& known = remainders_.tensors[parameter];
  return known.defined() ? std::optional(known.scalar_type()) : std::nullopt;
}

int64_t BlockOptimizer::remainder_elements(size_t parameter) const {
  const at::Tensor& known = remainders_.tensors[parameter];
  return known.defined() ? known.numel() : shard(parameter).count();
}

at::Tensor BlockOptimizer::made_remainder(size_t parameter, const MakeTensor& make, BlockStates::Hold* earlier) const {
  const at::Tensor& known = remainders_.tensors[parameter];
  const memory::TensorLayout& tensor = layout_.tensors[parameter];
  const c10::ScalarType dtype = *wanted_remainder(parameter);
  const at::Tensor made = known.defined()  ? make(known.sizes(), known.strides(), dtype)
                          : shard_.empty() ? make(tensor.sizes, tensor.strides, dtype)
                                           : make({shard_[parameter].count()}, {1}, dtype);
  if (made.is_meta()) return made;
  if (known.defined()) {
    convert_remainder(known.is_meta() ? (*earlier)[number_of(parameter)].tensors[0] : known, made);
  } else {
    start(made, own(layout_.view(block_.current()->flat, parameter), parameter));
  }
  return made;
}

void BlockOptimizer::prepare_masters() {
  const bool to_disk = states_->tier() != nullptr && holds_ == DiskHolds::kMasters;
  std::optional<BlockStates::Hold> earlier;
  if (remainders_.on_disk) earlier.emplace(remainders_.on_disk->hold());
  prepared_.assign(remainders_.tensors.size(), {});
  std::vector<size_t> moved;
  for (size_t i = 0; i < prepared_.size(); ++i) {
    if (!wanted_remainder(i)) continue;
    if (to_disk && remainder_elements(i) > 0) {
      moved.push_back(number_of(i));
    } else if (remainders_.tensors[i].defined() && remainders_.tensors[i].is_meta()) {
      prepared_[i] = made_remainder(i, make_in_arena, &*earlier);
    }
  }
  if (moved.empty()) return;
  const BlockStates::Hold hold = states_->hold_to_change(moved, [&](size_t number, const MakeTensor& make) {
    return ParameterState{{}, {made_remainder(number - prepared_.size(), make, earlier ? &*earlier : nullptr)}};
  });
  for (const size_t number : moved) prepared_[number - prepared_.size()] = (*states_)[number].tensors.front();
}

void BlockOptimizer::take_masters() {
  std::shared_ptr<BlockStates> on_disk;
  for (size_t i = 0; i < prepared_.size(); ++i) {
    at::Tensor& remainder = remainders_.tensors[i];
    const std::optional<c10::ScalarType> wanted = wanted_remainder(i);
    if (!wanted) continue;
    if (prepared_[i].defined()) {
      remainder = prepared_[i];
    } else if (!remainder.defined() || remainder.scalar_type() != *wanted) {
      remainder = made_remainder(i, make_in_arena, nullptr);
    }
    if (remainder.is_meta()) on_disk = states_;
  }
  remainders_.on_disk = std::move(on_disk);
  prepared_.clear();
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

void BlockOptimizer::start(const at::Tensor& remainder, const at::Tensor& weights) {
  if (remainder.scalar_type() == at::kFloat) {
    remainder.copy_(weights);
  } else {
    remainder.zero_();
  }
}

BlockOptimizer::WeightsOf BlockOptimizer::weights_in(const at::Tensor& block) const {
  return [this, block](size_t parameter) { return layout_.view(block, parameter); };
}

void BlockOptimizer::restart_masters(const at::Tensor& block) { restart_masters(weights_in(block)); }

void BlockOptimizer::restart_masters(const WeightsOf& weights) {
  bool on_disk = false;
  for (size_t i = 0; i < written_.size(); ++i)
    on_disk |= written_[i] && remainder(i).defined() && remainder(i).is_meta();
  std::optional<BlockStates::Hold> hold;
  if (on_disk) hold.emplace(remainders_.on_disk->hold_to_change());
  restart_masters(weights, on_disk ? &*hold : nullptr);
}

void BlockOptimizer::restart_masters(const WeightsOf& weights, BlockStates::Hold* hold) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < written_.size(); ++i) {
    if (!written_[i]) continue;
    const at::Tensor& known = remainder(i);
    if (known.defined()) start(known.is_meta() ? remainder(i, *hold) : known, own(weights(i), i));
    written_[i] = false;
  }
}

const at::Tensor& BlockOptimizer::remainder(size_t parameter, BlockStates::Hold& hold) const {
  const at::Tensor& known = remainder(parameter);
  return known.defined() && known.is_meta() ? hold[number_of(parameter)].tensors.front() : known;
}

at::Tensor BlockOptimizer::remainder_copy(size_t parameter) const {
  const at::Tensor& known = remainder(parameter);
  if (!known.defined() || !known.is_meta()) return known;
  BlockStates::Hold hold = remainders_.on_disk->hold();
  return remainder(parameter, hold).clone();
}

void BlockOptimizer::set_remainder(size_t parameter, const at::Tensor& saved) {
  const at::NoGradGuard no_grad;
  std::optional<BlockStates::Hold> hold;
  at::Tensor own = remainder(parameter);
  if (own.is_meta()) {
    hold.emplace(remainders_.on_disk->hold_to_change());
    own = remainder(parameter, *hold);
  }
  if (saved.scalar_type() == at::kFloat || own.scalar_type() == at::kFloat) {
    own.copy_(saved);
  } else {
    convert_remainder(saved, own);
  }
  written_[parameter] = false;
}

void BlockOptimizer::update(const at::Tensor& before, const at::Tensor& after, const GradientBlock& gradients,
                            const BlockLayout& gradient_layout, const std::vector<Hyperparameters>& groups,
                            const GradientScaling& scaling, ThreadPool& pool) {
  std::vector<size_t> fresh;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (groups_[i] < 0 || (shard(i).count() == 0 && !shard_.empty()) || states_->has(i)) continue;
    if (memory::gradient(gradients, gradient_layout, i).defined()) fresh.push_back(i);
  }
  BlockStates::Hold states = states_->hold_to_change(fresh, [&](size_t i, const MakeTensor& make) {
    const Hyperparameters& hyper = groups[static_cast<size_t>(groups_[i])];
    return make_state(algorithm_, hyper, format_.moments, own(layout_.view(before, i), i), make);
  });
  restart_masters(weights_in(before), &states);
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
    if (const at::Tensor& rest = remainder(i, states); rest.defined())
      (rest.scalar_type() == at::kFloat ? weights.master : weights.remainder) = rest;
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

int64_t BlockOptimizer::remainder_bytes() const {
  int64_t bytes = 0;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (const auto wanted = wanted_remainder(i))
      bytes += remainder_elements(i) * static_cast<int64_t>(c10::elementSize(*wanted));
  }
  return bytes;
}

int64_t BlockOptimizer::stored_bytes(const std::vector<Hyperparameters>& groups, DiskHolds holds) const {
  const bool with_masters = holds == DiskHolds::kMasters;
  size_t tensors = 0;
  for (size_t i = 0; i < groups_.size(); ++i) {
    if (with_masters && wanted_remainder(i)) ++tensors;
    if (groups_[i] < 0) continue;
    tensors +=
        state_names(algorithm_, groups[static_cast<size_t>(groups_[i])], format_.moments, layout_.tensors[i].sizes)
            .size();
  }
  const int64_t bytes = moment_bytes(groups) + (with_masters ? remainder_bytes() : 0);
  return align_up(bytes + static_cast<int64_t>(tensors) * kBlockAlignment_bytes, files::kDirect_bytes);
}

}  // namespace roundpipe::optim
