#include <roundpipe/memory/gradient_block.h>

#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

namespace roundpipe::memory {

at::Tensor gradient(const GradientBlock& block, const BlockLayout& layout, size_t index) {
  if (index >= block.received.size() || !block.received[index]) return {};
  return layout.view(block.flat, index);
}

TiedSum::TiedSum(GradientBlockPtr result, GradientBlockPtr base, const BlockLayout& layout,
                 std::shared_ptr<BufferPool> buffers, size_t layers, std::vector<size_t> group_ends)
    : result_(std::move(result)),
      base_(std::move(base)),
      layout_(layout),
      buffers_(std::move(buffers)),
      layers_(layers),
      group_ends_(std::move(group_ends)),
      contributions_(group_ends_.back(), std::vector<std::vector<at::Tensor>>(layers)),
      missing_(group_ends_.back(), layers) {}

void TiedSum::contribute(size_t layer, size_t microbatch, std::vector<at::Tensor> gradients) {
  {
    const MutexLock lock(mutex_);
    if (result_->landed->complete()) return;  // the call has failed
    contributions_[microbatch][layer] = std::move(gradients);
    --missing_[microbatch];
    const at::NoGradGuard no_grad;
    while (next_ < missing_.size() && missing_[next_] == 0) {
      fold_microbatch(next_++);
      if (next_ == group_ends_[group_]) end_group();
    }
    if (next_ < missing_.size()) return;
    finish();
  }
  // Without the lock: the next call's last contribution may end that call.
  result_->landed->fire();
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

void TiedSum::end_group() {
  ++group_;
  if (totals_.empty()) {
    totals_ = std::exchange(sums_, std::vector<at::Tensor>(sums_.size()));
    return;
  }
  for (size_t i = 0; i < sums_.size(); ++i) {
    const at::Tensor sum = std::exchange(sums_[i], {});
    if (!sum.defined()) continue;
    if (totals_[i].defined()) {
      totals_[i].add_(sum);
    } else {
      totals_[i] = sum;
    }
  }
}

void TiedSum::finish() {
  result_->flat = buffers_->take();
  result_->received.assign(totals_.size(), 0);
  for (size_t i = 0; i < totals_.size(); ++i) {
    if (!totals_[i].defined()) continue;
    layout_.view(result_->flat, i).copy_(totals_[i]);
    result_->received[i] = 1;
    totals_[i].reset();
  }
}

}  // namespace roundpipe::memory
