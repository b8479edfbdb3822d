#include <roundpipe/runtime/call/block_sum.h>

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

BlockSum::BlockSum(Target target, size_t layers, int groups)
    : target_(std::move(target)), groups_(groups), sums_(layers), queues_(layers) {}

bool BlockSum::add(size_t layer, schedule::Range groups, at::Tensor flat, std::vector<char> received,
                   memory::GradientRoom::SharePtr share) {
  const MutexLock lock(mutex_);
  if (target_.result->landed->complete()) return false;  // the call has failed
  queues_[layer].waiting[groups.first] = {groups.last, std::move(flat), std::move(received), std::move(share)};
  if (adding_ || !queues_[layer].is_ready()) return false;
  adding_ = true;
  return true;
}

bool BlockSum::fold() {
  for (;;) {
    size_t layer = 0;
    Part part;
    {
      const MutexLock lock(mutex_);
      while (layer < queues_.size() && !queues_[layer].is_ready()) ++layer;
      if (layer == queues_.size()) {
        // Once all have been added, nobody has to add any more.
        adding_ = std::ranges::all_of(queues_, [&](const Queue& queue) { return queue.next == groups_; });
        return adding_;
      }
      Queue& queue = queues_[layer];
      part = std::move(queue.waiting.extract(queue.next).mapped());
      queue.next = part.end;
    }
    fold(sums_[layer], std::move(part));
  }
}

void BlockSum::fold(Part& sum, Part part) const {
  if (!sum.flat.defined()) {
    sum = std::move(part);
    if (sum.share) sum.share->arrived();
    return;
  }
  for (size_t i = 0; part.flat.defined() && i < part.received.size(); ++i) {
    if (!part.received[i]) continue;
    const at::Tensor total = elements(target_.wide, sum.flat, i), term = elements(target_.wide, part.flat, i);
    if (sum.received[i]) {
      add_to(total, term);
    } else {
      copy_to(total, term);
      sum.received[i] = 1;
    }
  }
  part.flat.reset();
  if (part.share) part.share->give_back();
}

bool BlockSum::received(size_t parameter) const {
  const memory::GradientBlock* base = target_.base.get();
  return (base && base->flat.defined() && base->received[parameter]) ||
         std::ranges::any_of(sums_, [&](const Part& sum) { return sum.received[parameter] != 0; });
}

void BlockSum::combine_into(const at::Tensor& result, size_t parameter) const {
  at::Tensor sum;
  for (auto layer = sums_.rbegin(); layer != sums_.rend(); ++layer) {
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

void BlockSum::add_up() {
  const at::NoGradGuard no_grad;
  if (!fold()) return;
  memory::GradientBlock& block = *target_.result;
  for (size_t i = 0; i < target_.layout.tensors.size(); ++i) block.received.push_back(received(i) ? 1 : 0);
  const bool any = std::ranges::find(block.received, 1) != block.received.end();
  const at::Tensor& last = sums_.back().flat;
  if (any) block.flat = target_.wide.same_dtypes(target_.layout) && last.defined() ? last : target_.buffers->take();
  for (size_t i = 0; i < block.received.size(); ++i) {
    if (block.received[i]) combine_into(block.flat, i);
  }
  for (Part& sum : sums_) {
    sum.flat.reset();
    if (!sum.share) continue;
    // The result has that of one sum, whichever memory it is in.
    block.share ? sum.share->give_back() : block.share.swap(sum.share);
  }
  sums_.clear();
  block.landed->fire();
}

}  // namespace roundpipe::runtime
