#include <roundpipe/runtime/model/gradient_ledger.h>

#include <algorithm>
#include <stdexcept>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

namespace roundpipe::runtime {

using memory::GradientBlockPtr;

namespace {

// How often a gradient has been written to; a tensor made in inference mode does not count its writes.
uint32_t version_of(const at::Tensor& gradient) {
  return gradient.defined() && !gradient.is_inference() ? gradient._version() : 0;
}

// A sum of the engine and what `.grad` holds beside it; either may be undefined.
at::Tensor together(const at::Tensor& sum, const at::Tensor& beside) {
  const at::Tensor dense = beside.defined() && beside.layout() != c10::kStrided ? beside.to_dense() : beside;
  if (!sum.defined()) return dense;
  return dense.defined() ? sum + dense : sum;
}

}  // namespace

std::vector<GradientBlockPtr> GradientLedger::take() {
  import();
  std::vector<GradientBlockPtr> gradients(model_.blocks.size());
  gradients.swap(model_.gradients);
  return gradients;
}

void GradientLedger::drop() {
  std::fill(model_.gradients.begin(), model_.gradients.end(), nullptr);
  for (const BlockState& block : model_.blocks) {
    for (const memory::NamedTensor& parameter : block.block->parameters()) parameter.tensor.mutable_grad().reset();
  }
}

void GradientLedger::show() {
  // Shown gradients are the user's until the next call takes them back: cleared ones stay cleared.
  if (shown_) return;
  const at::NoGradGuard no_grad;
  for (size_t b = 0; b < model_.blocks.size(); ++b) {
    const auto& parameters = model_.blocks[b].block->parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      // Without a sum, what is there is the user's own, or another model's over the same parameters.
      const at::Tensor beside = parameters[i].tensor.grad();
      at::Tensor gradient = beside;
      if (model_.gradients[b]) {
        if (!model_.gradients[b]->landed->complete())
          throw std::logic_error("[gradients] a sum is shown before it has landed, although no call is running");
        gradient = together(memory::gradient(*model_.gradients[b], model_.blocks[b].gradient_layout, i), beside);
      }
      // As autograd leaves them: in the parameter's own dtype.
      if (gradient.defined()) gradient = gradient.to(parameters[i].tensor.scalar_type());
      parameters[i].tensor.mutable_grad() = gradient;
      // The block does not have what lay beside its sum, so import() must not take it for what is shown.
      const bool as_in_block = !model_.gradients[b] || !beside.defined();
      shown_gradients_.emplace_back(as_in_block ? gradient : at::Tensor(), version_of(gradient));
    }
  }
  shown_ = true;
}

std::vector<std::vector<at::Tensor>> GradientLedger::summed() const {
  std::vector<std::vector<at::Tensor>> sums;
  for (size_t b = 0; b < model_.blocks.size(); ++b) {
    auto& of_block = sums.emplace_back(model_.blocks[b].block->parameters().size());
    if (shown_ || !model_.gradients[b]) continue;
    for (size_t i = 0; i < of_block.size(); ++i) {
      of_block[i] = memory::gradient(*model_.gradients[b], model_.blocks[b].gradient_layout, i);
    }
  }
  return sums;
}

void GradientLedger::load(const std::vector<std::vector<at::Tensor>>& gradients) {
  const at::NoGradGuard no_grad;
  drop();
  shown_gradients_.clear();
  shown_ = false;
  for (size_t b = 0; b < model_.blocks.size(); ++b) {
    const auto defined = [](const at::Tensor& gradient) { return gradient.defined(); };
    if (std::none_of(gradients[b].begin(), gradients[b].end(), defined)) continue;
    auto loaded = std::make_shared<memory::GradientBlock>();
    loaded->flat = model_.blocks[b].gradient_buffers->take();
    loaded->received.assign(gradients[b].size(), 0);
    for (size_t i = 0; i < gradients[b].size(); ++i) {
      if (!gradients[b][i].defined()) continue;
      model_.blocks[b].gradient_layout.view(loaded->flat, i).copy_(gradients[b][i]);
      loaded->received[i] = 1;
    }
    loaded->landed->fire();
    model_.gradients[b] = std::move(loaded);
  }
  if (shows_at_once_) show();
}

bool GradientLedger::any() const {
  return std::any_of(model_.gradients.begin(), model_.gradients.end(),
                     [](const GradientBlockPtr& block) { return block != nullptr; });
}

bool GradientLedger::are_as_shown(size_t first, const std::vector<memory::NamedTensor>& parameters) const {
  if (!shown_) return false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& gradient = parameters[i].tensor.grad();
    const auto& [shown, version] = shown_gradients_[first + i];
    if (!gradient.is_same(shown) || version_of(gradient) != version) return false;
    if (gradient.defined() && gradient.is_inference()) return false;
  }
  return true;
}

void GradientLedger::import() {
  const at::NoGradGuard no_grad;
  size_t first = 0;  // the block's first place in shown_gradients_
  for (size_t b = 0; b < model_.blocks.size(); ++b) {
    const auto& parameters = model_.blocks[b].block->parameters();
    const size_t start = first;
    first += parameters.size();
    const bool any = std::any_of(parameters.begin(), parameters.end(),
                                 [](const memory::NamedTensor& p) { return p.tensor.grad().defined(); });
    GradientBlockPtr& current = model_.gradients[b];
    if (!any && !(shown_ && current)) continue;
    if (!any) {
      current.reset();
      continue;
    }
    if (current && are_as_shown(start, parameters)) {
      for (const memory::NamedTensor& parameter : parameters) parameter.tensor.mutable_grad().reset();
      continue;
    }
    const memory::BlockLayout& layout = model_.blocks[b].gradient_layout;
    auto imported = std::make_shared<memory::GradientBlock>();
    imported->flat = model_.blocks[b].gradient_buffers->take();
    imported->received.assign(parameters.size(), 0);
    for (size_t i = 0; i < parameters.size(); ++i) {
      at::Tensor& gradient = parameters[i].tensor.mutable_grad();
      at::Tensor sum;
      if (current && !shown_) {
        device::wait_interruptible(*current->landed);
        sum = memory::gradient(*current, layout, i);
      }
      const at::Tensor kept = together(sum, gradient);
      if (!kept.defined()) continue;
      layout.view(imported->flat, i).copy_(kept);
      imported->received[i] = 1;
      gradient.reset();
    }
    imported->landed->fire();
    current = std::move(imported);
  }
  shown_gradients_.clear();
  shown_ = false;
}

}  // namespace roundpipe::runtime
