#include <roundpipe/runtime/model/shells.h>

#include <algorithm>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <roundpipe/core/error.h>
#include <roundpipe/ops/wide_product.h>
#include <roundpipe/torch_compat/autograd_nodes.h>

namespace roundpipe::runtime {

namespace {

constexpr int64_t kPiece = int64_t{1} << 16;  // elements

// On the host, torch widens a whole gradient in 16 bits before it adds it to a sum in fp32.
void add_to(at::Tensor& sum, const at::Tensor& gradient) {
  const int64_t numel = gradient.numel();
  if (numel <= kPiece || !sum.device().is_cpu() || sum.scalar_type() == gradient.scalar_type()) {
    sum.add_(gradient);
    return;
  }
  const int64_t rows = gradient.size(0), step = std::max<int64_t>(1, kPiece / (numel / rows));
  for (int64_t row = 0; row < rows; row += step) {
    const int64_t count = std::min(step, rows - row);
    sum.narrow(0, row, count).add_(gradient.narrow(0, row, count));
  }
}

// Takes the gradients of a shell's parameter.
class SinkConsumer final : public torch_compat::GradientConsumer {
 public:
  SinkConsumer(Shell& shell, size_t parameter) : shell_(shell), parameter_(parameter) {}
  void consume(at::Tensor gradient) override { shell_.sink.consume(parameter_, std::move(gradient)); }
  bool add_product(const at::Tensor& left, const at::Tensor& right) override {
    return shell_.sink.add_product(parameter_, left, right);
  }
  bool add_wide(const at::Tensor& gradient) override { return shell_.sink.add_wide(parameter_, gradient); }

 private:
  Shell& shell_;
  const size_t parameter_;
};

}  // namespace

bool GradientSink::sums_wide(size_t parameter) const {
  const at::Tensor& target = targets[parameter];
  return taken_[parameter] > 0 || closed_[parameter] || (target.defined() && target.scalar_type() == at::kFloat);
}

bool GradientSink::arrives(size_t parameter) {
  if (taken_[parameter] > 0) {
    --taken_[parameter];
    return false;
  }
  came_late_ |= passed_;
  if (closed_[parameter]) {
    throw Error(
        "[backward] a gradient of a parameter came after the backward had passed its layer, and had come in time "
        "before; this step is dropped, the next ones take it into account");
  }
  return true;
}

void GradientSink::note(size_t parameter) {
  in_parts_ |= came_[parameter] != 0;
  ++came_[parameter];
}

bool GradientSink::add_product(size_t parameter, const at::Tensor& left, const at::Tensor& right) {
  if (!sums_wide(parameter) || left.scalar_type() == at::kFloat) return false;
  if (!arrives(parameter)) return true;
  const at::NoGradGuard no_grad;
  // In one piece: if memory runs out, nothing has been added.
  ops::add_wide_product(targets[parameter], left, right, 1, targets[parameter].numel(), received[parameter] != 0);
  received[parameter] = 1;
  note(parameter);
  return true;
}

bool GradientSink::add_wide(size_t parameter, const at::Tensor& gradient) {
  if (!sums_wide(parameter)) return false;
  consume(parameter, gradient);
  return true;
}

void GradientSink::consume(size_t parameter, at::Tensor gradient) {
  if (!arrives(parameter)) return;
  const at::NoGradGuard no_grad;
  if (gradient.layout() != c10::kStrided) gradient = gradient.to_dense();
  if (!targets[parameter].defined()) {
    // A layer that calls backward itself (reentrant checkpointing) may bring several gradients for one parameter.
    at::Tensor& sum = tied[parameter];
    sum = sum.defined() ? sum + gradient : gradient;
  } else if (received[parameter]) {
    add_to(targets[parameter], gradient);
  } else {
    targets[parameter].copy_(gradient);
    received[parameter] = 1;
  }
  note(parameter);
}

void GradientSink::begin_microbatch() {
  taken_.assign(taken_.size(), 0);
  came_.assign(came_.size(), 0);
  in_parts_ = passed_ = came_late_ = false;
}

void GradientSink::retry() {
  taken_ = came_;
  passed_ = false;
}

void GradientSink::close(size_t parameter) {
  targets[parameter].reset();
  closed_[parameter] = 1;
}

void GradientSink::reset(size_t parameters) {
  targets.assign(parameters, {});
  received.assign(parameters, 0);
  tied.assign(parameters, {});
  taken_.assign(parameters, 0);
  came_.assign(parameters, 0);
  closed_.assign(parameters, 0);
  in_parts_ = passed_ = came_late_ = false;
}

Shell& Shells::get(int worker, size_t index, Layer& layer, c10::Device device,
                   const std::shared_ptr<const void>& attributes) {
  Shell* shell = nullptr;
  {
    const MutexLock lock(mutex_);
    std::unique_ptr<Shell>& place = shells_[{worker, index}];
    if (!place) place = std::make_unique<Shell>();
    shell = place.get();
  }
  if (!shell->layer) {
    shell->layer = layer.make_shell(device);
    for (size_t i = 0; i < shell->layer->parameters.size(); ++i) {
      torch_compat::consume_gradients(shell->layer->parameters[i], c10::make_intrusive<SinkConsumer>(*shell, i));
    }
  }
  if (!shell->refreshed || shell->attributes != attributes) {
    shell->layer->refresh(attributes);
    shell->attributes = attributes;
    shell->refreshed = true;
  }
  return *shell;
}

void Shells::keep(const std::vector<int>& workers) {
  std::vector<std::unique_ptr<Shell>> dropped;  // after the lock
  const MutexLock lock(mutex_);
  for (auto place = shells_.begin(); place != shells_.end();) {
    if (std::ranges::find(workers, place->first.first) != workers.end()) {
      ++place;
      continue;
    }
    dropped.push_back(std::move(place->second));
    place = shells_.erase(place);
  }
}

}  // namespace roundpipe::runtime
