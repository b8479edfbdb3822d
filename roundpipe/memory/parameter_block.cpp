#include <roundpipe/memory/parameter_block.h>

#include <algorithm>
#include <limits>
#include <map>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <roundpipe/core/error.h>
#include <roundpipe/memory/mapped_file.h>
#include <roundpipe/memory/overlap.h>

namespace roundpipe::memory {

using device::EventPtr;

namespace {

// The tensor that parameters point at while their values are being made.
const at::Tensor& no_value(c10::ScalarType dtype) {
  static std::mutex mutex;
  static auto* values = new std::map<c10::ScalarType, at::Tensor>;  // protected by mutex
  std::lock_guard lock(mutex);
  at::Tensor& value = (*values)[dtype];
  if (!value.defined()) {
    const bool has_nan = c10::isFloatingType(dtype) || c10::isComplexType(dtype);
    value = at::full({}, has_nan ? std::numeric_limits<double>::quiet_NaN() : 0.0, at::TensorOptions().dtype(dtype));
  }
  return value;
}

bool is_no_value(const at::Tensor& tensor) {
  return tensor.storage().is_alias_of(no_value(tensor.scalar_type()).storage());
}

}  // namespace

ParameterBlock::ParameterBlock(std::vector<NamedTensor> parameters, bool pinned)
    : parameters_(std::move(parameters)), current_(std::make_shared<WeightVersion>()) {
  for (const NamedTensor& parameter : parameters_) {
    if (!parameter.tensor.device().is_cpu()) {
      throw std::invalid_argument(concat("[RoundPipe] parameter '", parameter.name, "' is on ",
                                         parameter.tensor.device().str(),
                                         "; weights live on the host, so move the model to the CPU first; one without "
                                         "values (on meta) is made there, in Python by to_empty(device='cpu')"));
    }
    layout_.add(parameter.tensor, parameter.tensor.scalar_type());
  }
  const at::NoGradGuard no_grad;
  buffers_ = std::make_shared<BufferPool>(layout_.size_bytes, pinned);
  const bool mapped = std::all_of(parameters_.begin(), parameters_.end(), [](const NamedTensor& parameter) {
    return !parameter.tensor.requires_grad() && is_mapped(parameter.tensor);
  });
  if (mapped && !parameters_.empty()) {
    for (const NamedTensor& parameter : parameters_) current_->parts.push_back(parameter.tensor.detach());
    current_->published->fire();
    shown_ = current_->parts.front();
    return;
  }
  current_->flat = buffers_->take();
  current_->published->fire();
  shown_ = current_->flat;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor view = layout_.view(current_->flat, i);
    view.copy_(parameters_[i].tensor.detach());
    parameters_[i].tensor.set_data(view);
  }
}

void ParameterBlock::use_pool(const std::shared_ptr<BufferPool>& pool) {
  if (pool == buffers_) return;
  pool->take_over(*buffers_);
  buffers_ = pool;
}

void ParameterBlock::add_reader(const WeightVersionPtr& version, EventPtr uploaded) {
  version->readers.add(std::move(uploaded));
}

void ParameterBlock::retire(const WeightVersionPtr& version, const WeightVersionPtr& successor, Update* update) {
  version->retired = true;
  std::vector<EventPtr> uses = version->readers.take();
  if (update && version->published->complete()) {
    update->spare = version->flat;
    update->reads = uses;
  }
  uses.push_back(successor->published);
  device::when_all(uses, [version] { version->flat.reset(); });
}

ParameterBlock::Update ParameterBlock::begin_update(Reads reads) {
  settle();
  Update update{current_, std::make_shared<WeightVersion>(), {}, {}};
  const WeightVersionPtr previous = std::move(previous_);
  if (reads == Reads::kBefore) {
    next_ = update.after;
  } else {
    current_ = update.after;
  }
  if (reads == Reads::kAfterAndGraphs) previous_ = update.before;
  if (previous) retire(previous, update.before, &update);
  if (reads == Reads::kAfter) retire(update.before, update.after, &update);
  return update;
}

void ParameterBlock::copy_in(Update& update, const std::vector<at::Tensor>& values) const {
  for (const EventPtr& read : update.reads) read->wait_complete();
  const at::NoGradGuard no_grad;
  at::Tensor& flat = update.after->flat;
  flat = update.spare.defined() ? std::move(update.spare) : buffers_->take();
  for (size_t i = 0; i < parameters_.size(); ++i) layout_.view(flat, i).copy_(values[i]);
  update.after->published->fire();
}

bool ParameterBlock::settle() {
  if (!next_) return false;
  retire(current_, next_, nullptr);
  current_ = std::move(next_);
  next_.reset();
  return true;
}

void ParameterBlock::repoint() {
  if (!has_parameters_) return;
  const bool complete = current_->published->complete() && !current_->published->error();
  if (!current_->parts.empty()) {
    for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].tensor.set_data(current_->parts[i]);
    return;
  }
  shown_ = complete ? current_->flat : at::Tensor();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const TensorLayout& tensor = layout_.tensors[i];
    parameters_[i].tensor.set_data(complete ? layout_.view(shown_, i) : no_value(tensor.dtype).expand(tensor.sizes));
  }
}

void ParameterBlock::show_newest() {
  if (!has_parameters_) return;
  if (!current_->parts.empty()) return repoint();  // mapped parts are the only version
  const WeightVersionPtr& version = newest();
  if (!version->published->complete() || version->published->error() || !version->flat.defined()) return;
  shown_ = version->flat;
  for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].tensor.set_data(layout_.view(shown_, i));
}

bool ParameterBlock::newest_has(size_t index) const {
  if (settled() || shows_newest()) return true;
  return index < adopted_.size() && adopted_[index] == parameters_[index].tensor._version();
}

bool ParameterBlock::points_here(size_t index) const {
  const at::Tensor& tensor = parameters_[index].tensor;
  const TensorLayout& expected = layout_.tensors[index];
  if (tensor.scalar_type() != expected.dtype || tensor.sizes() != at::IntArrayRef(expected.sizes)) return false;
  if (tensor.numel() == 0) return tensor.device().is_cpu();
  if (!current_->parts.empty()) {
    const at::Tensor& part = current_->parts[index];
    return tensor.const_data_ptr() == part.const_data_ptr() && tensor.strides() == part.strides();
  }
  if (!shown_.defined()) return is_no_value(tensor);
  const auto* place = static_cast<const char*>(shown_.const_data_ptr()) + expected.offset_bytes;
  return tensor.const_data_ptr() == place && tensor.strides() == at::IntArrayRef(expected.strides);
}

std::vector<size_t> ParameterBlock::replaced() const {
  std::vector<size_t> indices;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (points_here(i)) continue;
    const at::Tensor& tensor = parameters_[i].tensor;
    const TensorLayout& expected = layout_.tensors[i];
    if (tensor.scalar_type() != expected.dtype || tensor.sizes() != at::IntArrayRef(expected.sizes) ||
        !tensor.device().is_cpu()) {
      throw std::invalid_argument(concat("[RoundPipe] parameter '", parameters_[i].name, "' has become ",
                                         tensor.toString(), tensor.sizes(), " since the model was wrapped (was ",
                                         c10::toString(expected.dtype), at::IntArrayRef(expected.sizes),
                                         " on the CPU); change the model first, then wrap it"));
    }
    if (tensor.numel() > 0 && is_no_value(tensor)) {
      throw std::invalid_argument(concat("[RoundPipe] parameter '", parameters_[i].name,
                                         "' has been assigned that of a model whose step is under way, which has no "
                                         "values then; call synchronize() of that model first"));
    }
    indices.push_back(i);
  }
  return indices;
}

void ParameterBlock::adopt_replaced(const std::vector<ParameterBlock*>& blocks) {
  const at::NoGradGuard no_grad;
  std::vector<std::pair<ParameterBlock*, std::vector<size_t>>> found;
  for (ParameterBlock* const block : blocks) {
    if (!block->has_parameters_) continue;
    block->own_trainable();
    if (std::vector<size_t> indices = block->replaced(); !indices.empty()) {
      found.emplace_back(block, std::move(indices));
    }
  }
  if (found.empty()) return;
  std::vector<NamedTensor> shown;
  for (const ParameterBlock* const block : blocks) {
    for (const NamedTensor& parameter : block->parameters_) {
      if (block->has_parameters_ && !is_no_value(parameter.tensor)) shown.push_back(parameter);
    }
  }
  refuse_overlap(shown);
  std::unordered_set<const void*> written;
  for (const auto& [block, indices] : found) {
    device::wait_interruptible(*block->current_->published);
    device::wait_interruptible(*block->newest()->published);
    for (const at::Tensor& flat : {block->shown_, block->current_->flat, block->newest()->flat}) {
      if (flat.defined()) written.insert(flat.storage().data());
    }
  }
  // Where parameters have changed places, the first to be adopted would write over the value of the second.
  for (const auto& [block, indices] : found) {
    for (const size_t i : indices) {
      const at::Tensor& tensor = block->parameters_[i].tensor;
      if (written.contains(tensor.storage().data())) tensor.set_data(tensor.detach().clone());
    }
  }
  for (const auto& [block, indices] : found) block->adopt(indices);
}

void ParameterBlock::adopt(const std::vector<size_t>& indices) {
  for (const EventPtr& upload : current_->readers.take()) upload->wait_complete();
  const bool mapped = !current_->parts.empty(), showed_newest = shows_newest();
  adopted_.resize(parameters_.size());
  for (const size_t i : indices) {
    const at::Tensor& tensor = parameters_[i].tensor;
    (mapped ? current_->parts[i] : layout_.view(current_->flat, i)).copy_(tensor.detach());
    if (next_) layout_.view(next_->flat, i).copy_(tensor.detach());
    // Holders of a copy see from the version that the values have changed.
    tensor.unsafeGetTensorImpl()->bump_version();
    adopted_[i] = tensor._version();
  }
  showed_newest ? show_newest() : repoint();
}

void ParameterBlock::own_trainable() {
  const auto trainable = [](const NamedTensor& parameter) { return parameter.tensor.requires_grad(); };
  if (current_->parts.empty() || std::none_of(parameters_.begin(), parameters_.end(), trainable)) return;
  const at::NoGradGuard no_grad;
  // A new version, because uploads of the parts may be pending.
  const auto owned = std::make_shared<WeightVersion>();
  owned->flat = buffers_->take();
  for (size_t i = 0; i < parameters_.size(); ++i) layout_.view(owned->flat, i).copy_(current_->parts[i]);
  owned->published->fire();
  current_ = owned;
  repoint();
}

}  // namespace roundpipe::memory
