#include <roundpipe/runtime/call/layer_sums.h>

#include <algorithm>

#include <ATen/core/grad_mode.h>

#include <roundpipe/optim/thread_pool.h>

namespace roundpipe::runtime {

namespace {

// The number of elements that torch's own kernels process on one thread.
constexpr int64_t kGrain = 32768;

// The elements of parameter `index` of a block, in memory order.
at::Tensor elements(const memory::BlockLayout& layout, const at::Tensor& flat, size_t index) {
  const memory::TensorLayout& place = layout.tensors[index];
  return flat.narrow(0, place.offset_bytes, place.size_bytes).view(place.dtype);
}

// Runs `work` in pieces on the update threads: on the whole, torch would start its own threads beside them.
void in_pieces(int64_t count, const std::function<void(int64_t begin, int64_t size)>& work) {
  optim::ThreadPool::current()->for_ranges(count, kGrain, [&](int64_t begin, int64_t end) {
    const at::NoGradGuard no_grad;
    for (; begin < end; begin += kGrain) work(begin, std::min(kGrain, end - begin));
  });
}

void add_to(const at::Tensor& sum, const at::Tensor& term) {
  in_pieces(sum.numel(), [&](int64_t begin, int64_t size) {
    at::Tensor piece = sum.narrow(0, begin, size);
    piece.add_(term.narrow(0, begin, size));
  });
}

void copy_to(const at::Tensor& target, const at::Tensor& source) {
  in_pieces(target.numel(), [&](int64_t begin, int64_t size) {
    at::Tensor piece = target.narrow(0, begin, size);
    piece.copy_(source.narrow(0, begin, size));
  });
}

}  // namespace

LayerSums::LayerSums(Target target, size_t layers, size_t microbatches)
    : target_(std::move(target)), microbatches_(microbatches), layers_(layers), incomplete_(layers) {}

bool LayerSums::add(size_t layer, size_t count, at::Tensor flat, std::vector<char> received) {
  const MutexLock lock(mutex_);
  Layer& sum = layers_[layer];
  sum.flat = std::move(flat);
  sum.received = std::move(received);
  sum.next = count;
  return fold(sum);
}

bool LayerSums::contribute(size_t layer, size_t microbatch, std::vector<at::Tensor> gradients) {
  const MutexLock lock(mutex_);
  Layer& sum = layers_[layer];
  sum.waiting[microbatch] = std::move(gradients);
  return fold(sum);
}

bool LayerSums::fold(Layer& layer) {
  if (target_.result->landed->complete() || layer.next == 0) return false;  // the call has failed, or no sum yet
  const at::NoGradGuard no_grad;
  for (auto next = layer.waiting.find(layer.next); next != layer.waiting.end();
       next = layer.waiting.find(++layer.next)) {
    for (size_t i = 0; i < next->second.size(); ++i) {
      const at::Tensor& gradient = next->second[i];
      if (!gradient.defined()) continue;
      if (!layer.flat.defined()) layer.flat = target_.wide_buffers->take();
      at::Tensor sum = target_.wide.view(layer.flat, i);
      if (layer.received[i]) {
        sum.add_(gradient);
      } else {
        sum.copy_(gradient);
        layer.received[i] = 1;
      }
    }
    layer.waiting.erase(next);
  }
  return layer.next == microbatches_ && --incomplete_ == 0;
}

bool LayerSums::received(size_t parameter) const {
  const memory::GradientBlock* base = target_.base.get();
  return (base && base->flat.defined() && base->received[parameter]) ||
         std::any_of(layers_.begin(), layers_.end(), [&](const Layer& layer) { return layer.received[parameter]; });
}

void LayerSums::combine_into(const at::Tensor& result, size_t parameter) {
  at::Tensor sum;
  for (auto layer = layers_.rbegin(); layer != layers_.rend(); ++layer) {
    if (!layer->received[parameter]) continue;
    const at::Tensor term = elements(target_.wide, layer->flat, parameter);
    if (sum.defined()) {
      add_to(sum, term);
    } else {
      sum = term;
    }
  }
  const memory::GradientBlock* base = target_.base.get();
  if (base && base->flat.defined() && base->received[parameter]) {
    const at::Tensor before = elements(target_.layout, base->flat, parameter);
    if (sum.defined()) {
      add_to(sum, before);
    } else {
      sum = before;
    }
  }
  const at::Tensor place = elements(target_.layout, result, parameter);
  if (sum.data_ptr() != place.data_ptr()) copy_to(place, sum);
}

void LayerSums::combine() {
  const at::NoGradGuard no_grad;
  memory::GradientBlock& block = *target_.result;
  {
    const MutexLock lock(mutex_);
    for (size_t i = 0; i < target_.layout.tensors.size(); ++i) block.received.push_back(received(i) ? 1 : 0);
    const bool any = std::find(block.received.begin(), block.received.end(), 1) != block.received.end();
    const at::Tensor& last = layers_.back().flat;
    if (any) block.flat = target_.wide.same_dtypes(target_.layout) && last.defined() ? last : target_.buffers->take();
    for (size_t i = 0; i < block.received.size(); ++i) {
      if (block.received[i]) combine_into(block.flat, i);
    }
    layers_.clear();
  }
  block.landed->fire();
}

}  // namespace roundpipe::runtime
