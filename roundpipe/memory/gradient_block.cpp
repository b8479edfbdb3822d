#include <roundpipe/memory/gradient_block.h>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

namespace roundpipe::memory {

at::Tensor gradient(const GradientBlock& block, const BlockLayout& layout, size_t index) {
  if (index >= block.received.size() || !block.received[index]) return {};
  return layout.view(block.flat, index);
}

RangeSum::RangeSum(GradientBlockPtr result, const BlockLayout& layout, size_t ranges)
    : result_(std::move(result)), layout_(layout), parts_(ranges), missing_(ranges) {}

void RangeSum::add(size_t range, at::Tensor flat, std::vector<char> received) {
  const MutexLock lock(mutex_);
  parts_[range] = {std::move(flat), std::move(received)};
  if (--missing_ > 0) return;
  const at::NoGradGuard no_grad;
  Part sum = std::move(parts_[0]);
  for (size_t part = 1; part < parts_.size(); ++part) {
    for (size_t i = 0; i < layout_.tensors.size(); ++i) {
      if (!parts_[part].received[i]) continue;
      const at::Tensor term = layout_.view(parts_[part].flat, i);
      if (sum.received[i]) {
        layout_.view(sum.flat, i).add_(term);
      } else {
        layout_.view(sum.flat, i).copy_(term);
        sum.received[i] = 1;
      }
    }
  }
  parts_.clear();
  result_->flat = std::move(sum.flat);
  result_->received = std::move(sum.received);
  result_->landed->fire();
}

TiedSum::TiedSum(GradientBlockPtr result, GradientBlockPtr base, const BlockLayout& layout,
                 std::shared_ptr<BufferPool> buffers, size_t layers, size_t microbatches)
    : result_(std::move(result)),
      base_(std::move(base)),
      layout_(layout),
      buffers_(std::move(buffers)),
      layers_(layers),
      contributions_(microbatches, std::vector<std::vector<at::Tensor>>(layers)),
      missing_(microbatches, layers) {}

void TiedSum::contribute(size_t layer, size_t microbatch, std::vector<at::Tensor> gradients) {
  const MutexLock lock(mutex_);
  if (result_->landed->complete()) return;  // the call has failed
  contributions_[microbatch][layer] = std::move(gradients);
  --missing_[microbatch];
  const at::NoGradGuard no_grad;
  while (next_ < missing_.size() && missing_[next_] == 0) fold_microbatch(next_++);
  if (next_ == missing_.size()) finish();
}

void TiedSum::start() {
  sums_.resize(layout_.tensors.size());
  for (size_t i = 0; base_ && base_->flat.defined() && i < sums_.size(); ++i) {
    const at::Tensor present = gradient(*base_, layout_, i);
    if (present.defined()) sums_[i] = present.to(sum_dtype(i), /*non_blocking=*/false, /*copy=*/true);
  }
}

c10::ScalarType TiedSum::sum_dtype(size_t index) const {
  const c10::ScalarType dtype = layout_.tensors[index].dtype;
  return dtype == at::kBFloat16 || dtype == at::kHalf ? at::kFloat : dtype;
}

void TiedSum::fold_microbatch(size_t microbatch) {
  if (sums_.empty()) start();
  for (size_t i = 0; i < sums_.size(); ++i) {
    at::Tensor sum;
    for (size_t layer = layers_; layer-- > 0;) {
      const std::vector<at::Tensor>& gradients = contributions_[microbatch][layer];
      if (i >= gradients.size() || !gradients[i].defined()) continue;
      sum = sum.defined() ? sum + gradients[i] : gradients[i];
    }
    if (!sum.defined()) continue;
    if (sums_[i].defined()) {
      sums_[i].add_(sum);
    } else {
      sums_[i] = sum.to(sum_dtype(i), /*non_blocking=*/false, /*copy=*/true);
    }
  }
  contributions_[microbatch].clear();
}

void TiedSum::finish() {
  result_->flat = buffers_->take();
  result_->received.assign(sums_.size(), 0);
  for (size_t i = 0; i < sums_.size(); ++i) {
    if (!sums_[i].defined()) continue;
    layout_.view(result_->flat, i).copy_(sums_[i]);
    result_->received[i] = 1;
    sums_[i].reset();
  }
  result_->landed->fire();
}

}  // namespace roundpipe::memory
