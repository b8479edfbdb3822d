#include <roundpipe/optim/block_states.h>

#include <utility>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>

namespace roundpipe::optim {

using Use = storage::DiskTier::Use;

namespace {

at::Tensor without_values(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return at::empty_strided(sizes, strides, at::TensorOptions().dtype(dtype).device(at::kMeta));
}

}  // namespace

void BlockStates::keep_on(std::shared_ptr<storage::DiskTier> tier, size_t index) {
  tier_ = std::move(tier);
  index_ = index;
}

void BlockStates::update_is_over() noexcept {
  if (tier_) tier_->over(index_);
}

bool BlockStates::has(size_t parameter) const {
  return !states_[parameter].tensors.empty() || states_[parameter].scalars.step > 0;
}

void BlockStates::set(size_t parameter, ParameterState state) {
  if (!tier_ || state.tensors.empty()) {
    states_[parameter] = std::move(state);
    return;
  }
  Hold hold = hold_to_change({parameter}, [&](size_t, const MakeTensor& make) {
    ParameterState made{state.scalars, {}};
    for (const at::Tensor& tensor : state.tensors)
      made.tensors.push_back(make(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
    return made;
  });
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < state.tensors.size(); ++i) hold[parameter].tensors[i].copy_(state.tensors[i]);
}

BlockStates::Hold::Hold(Hold&& other) noexcept
    : of_(std::exchange(other.of_, nullptr)), use_(other.use_), states_(std::move(other.states_)) {}

BlockStates::Hold::~Hold() {
  if (of_ == nullptr || states_.empty()) return;
  if (use_ == Use::kChange) {
    for (size_t i = 0; i < states_.size(); ++i) of_->states_[i].scalars = states_[i].scalars;
  }
  states_.clear();
  of_->tier_->release(of_->index_, use_);
}

void BlockStates::place(size_t parameter, const std::vector<at::Tensor>& tensors) {
  const auto is_alike = [&](size_t first) {
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (first + i >= layout_.tensors.size()) return false;
      const memory::TensorLayout& there = layout_.tensors[first + i];
      if (there.dtype != tensors[i].scalar_type() || tensors[i].sizes() != at::IntArrayRef(there.sizes) ||
          tensors[i].strides() != at::IntArrayRef(there.strides))
        return false;
    }
    return true;
  };
  if (first_[parameter] != kNone && is_alike(first_[parameter])) return;
  first_[parameter] = layout_.tensors.size();
  for (const at::Tensor& tensor : tensors) layout_.add(tensor, tensor.scalar_type());
}

void BlockStates::bind(Hold& hold, const at::Tensor& flat) const {
  hold.states_.resize(states_.size());
  for (size_t i = 0; i < states_.size(); ++i) {
    hold.states_[i].scalars = states_[i].scalars;
    for (size_t t = 0; t < states_[i].tensors.size(); ++t)
      hold.states_[i].tensors.push_back(layout_.view(flat, first_[i] + t));
  }
}

BlockStates::Hold BlockStates::hold() {
  Hold hold(*this, Use::kRead);
  if (tier_ && layout_.size_bytes > 0) bind(hold, tier_->acquire(index_, layout_.size_bytes, Use::kRead));
  return hold;
}

BlockStates::Hold BlockStates::hold_to_change(const std::vector<size_t>& fresh, const Make& make) {
  const at::NoGradGuard no_grad;
  Hold hold(*this, Use::kChange);
  if (!tier_) {
    for (const size_t i : fresh) states_[i] = make(i, make_in_arena);
    return hold;
  }
  std::vector<ParameterState> made;
  for (const size_t i : fresh) made.push_back(make(i, without_values));
  const memory::BlockLayout layout = layout_;
  const std::vector<size_t> first = first_;
  for (size_t f = 0; f < fresh.size(); ++f) place(fresh[f], made[f].tensors);
  at::Tensor flat;
  try {
    if (layout_.size_bytes > 0) flat = tier_->acquire(index_, layout_.size_bytes, Use::kChange);
  } catch (...) {
    layout_ = layout;
    first_ = first;
    throw;
  }
  for (size_t f = 0; f < fresh.size(); ++f) states_[fresh[f]] = std::move(made[f]);
  if (!flat.defined()) return hold;
  bind(hold, flat);
  for (const size_t i : fresh) {
    const ParameterState& state = std::as_const(hold.states_)[i];
    size_t next = 0;
    make(i, [&](at::IntArrayRef, at::IntArrayRef, at::ScalarType) { return state.tensors[next++]; });
  }
  return hold;
}

}  // namespace roundpipe::optim
