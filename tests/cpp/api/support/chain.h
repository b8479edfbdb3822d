#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Version.h>
#include <roundpipe/roundpipe.h>
#include <torch/nn.h>

#include "plain_loop.h"

namespace roundpipe::support {

struct OnPurpose : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A place in a layer where something happens: from a visit on, which is counted from when it was set. Any thread.
class Trap {
 public:
  using Action = std::function<Tensor(Tensor)>;
  void set(int visit, Action action) {
    const std::lock_guard lock(mutex_);
    left_ = visit;
    action_ = std::move(action);
  }
  void throw_from(int visit) {
    set(visit, [](const Tensor&) -> Tensor { throw OnPurpose("in a layer"); });
  }
  void clear() { set(1, nullptr); }
  Tensor pass(Tensor value) {
    Action action;
    {
      const std::lock_guard lock(mutex_);
      if (left_ > 1)
        --left_;
      else
        action = action_;
    }
    return action ? action(std::move(value)) : value;
  }

 private:
  std::mutex mutex_;
  int left_ = 1;  // Protected by mutex_, as is the next.
  Action action_;
};

// Six small layers: some draw, one writes buffers, one has a trap.
struct Chain {
  static constexpr int64_t kIn = 6, kWidth = 8, kOut = 4;
  static constexpr int kTrap = 3;  // the layer with the trap

  torch::nn::Linear first{kIn, kWidth};
  torch::nn::BatchNorm1d norm{kWidth};
  torch::nn::Dropout drop{0.25};
  torch::nn::Linear middle{kWidth, kWidth};
  torch::nn::Linear last{kWidth, kOut};
  std::shared_ptr<Trap> trap = std::make_shared<Trap>();

  // With the same values, and a trap of its own.
  Chain twin() const {
    Chain other;
    other.first = twin_of(first);
    other.norm = twin_of(norm);
    other.drop = twin_of(drop);
    other.middle = twin_of(middle);
    other.last = twin_of(last);
    return other;
  }
  std::vector<Layer> layers() const {
    const auto passes = [trap = trap](const std::vector<Tensor>&, const Tensor& x) { return trap->pass(x.tanh()); };
    return {layer(first), layer(norm), layer(drop), layer({}, passes), layer(middle), layer(last)};
  }
  std::vector<std::function<Tensor(Tensor)>> bodies() const {
    return {[own = first](const Tensor& x) mutable { return own(x); },
            [own = norm](const Tensor& x) mutable { return own(x); },
            [own = drop](const Tensor& x) mutable { return own(x); },
            [](const Tensor& x) { return x.tanh(); },
            [own = middle](const Tensor& x) mutable { return own(x); },
            [own = last](const Tensor& x) mutable { return own(x); }};
  }
  std::vector<Tensor> parameters() const {
    std::vector<Tensor> all;
    for (const auto& each : {first->parameters(), norm->parameters(), middle->parameters(), last->parameters()})
      all.insert(all.end(), each.begin(), each.end());
    return all;
  }
  std::vector<Tensor> buffers() const { return norm->buffers(); }
};

inline Tensor squared_error(const Tensor& outputs, const Tensor& label) { return (outputs - label).square().sum(); }

struct Sample {
  Tensor inputs, labels;
};
// The same for the same number, in every process.
inline Sample sample(uint64_t number, int64_t rows = 12) {
  const at::Generator own = at::detail::createCPUGenerator(number);
  return {at::randn({rows, Chain::kIn}, own), at::randn({rows, Chain::kOut}, own)};
}

inline std::vector<Tensor> copies_of(const std::vector<Tensor>& tensors) {
  std::vector<Tensor> copies;
  for (const Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

// Whether tensors have the same bits. After steps with torch's kernels for any processor, they may only be close: those
// round twice where the others, as ours, fuse a product and a sum.
inline bool alike(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  if (at::get_cpu_capability() != "DEFAULT") return same_state(a, b);
  bool close = a.size() == b.size();
  for (size_t i = 0; close && i < a.size(); ++i) close = at::allclose(a[i], b[i], 1e-4, 1e-5);
  return close;
}

// A plain loop of libtorch over a chain, with SGD. If it is `asynchronous`, calls read the weights of one step ago.
class PlainTraining {
 public:
  static torch::optim::SGDOptions rule() { return torch::optim::SGDOptions(0.001).momentum(0.9); }

  PlainTraining(const Chain& like, bool asynchronous) : chain_(like.twin()), asynchronous_(asynchronous) {
    for (const Tensor& parameter : chain_.parameters())
      newest_.push_back(parameter.detach().clone().set_requires_grad(true));
    sgd_ = std::make_unique<torch::optim::SGD>(newest_, rule());
  }
  // Call number `number` of `model`.
  Tensor call(const Model& model, uint64_t number, const Sample& batch, int microbatches) {
    const PlainStep step{chain_.bodies(), squared_error, chain_.parameters()};
    return step.run(model, number, batch.inputs, batch.labels, microbatches);
  }
  // From now on, calls read the newest weights, as after Model::synchronize().
  void publish() {
    const std::vector<Tensor> parameters = chain_.parameters();
    const at::NoGradGuard no_grad;
    for (size_t i = 0; i < parameters.size(); ++i) Tensor(parameters[i]).copy_(newest_[i]);
  }
  void step() {
    const std::vector<Tensor> parameters = chain_.parameters();
    if (asynchronous_) publish();
    for (size_t i = 0; i < parameters.size(); ++i) {
      newest_[i].mutable_grad() = parameters[i].grad();
      parameters[i].mutable_grad() = Tensor();
    }
    sgd_->step();
    if (!asynchronous_) publish();
  }
  // The newest weights, and the buffers.
  std::vector<Tensor> state() const {
    std::vector<Tensor> state = copies_of(newest_);
    for (const Tensor& buffer : chain_.buffers()) state.push_back(buffer);
    return state;
  }

 private:
  Chain chain_;
  bool asynchronous_;
  std::vector<Tensor> newest_;
  std::unique_ptr<torch::optim::SGD> sgd_;
};

// A model over a chain, and the plain loop beside it, which get the same batches and steps.
struct Duel {
  explicit Duel(bool asynchronous = false, ModelOptions options = {})
      : plain(chain, asynchronous), model(chain.layers(), std::move(options)), is_asynchronous(asynchronous) {
    if (!model.run_options().microbatches) model.run_options().microbatches = 3;
  }
  int microbatches() { return *model.run_options().microbatches; }
  // Both, with the same sample. Returns whether the losses are alike.
  bool call(uint64_t number) {
    const Sample batch = sample(number);
    const uint64_t own = model.calls();
    const Tensor loss = model.forward_backward(batch.inputs, batch.labels, squared_error).loss;
    return alike({loss}, {plain.call(model, own, batch, microbatches())});
  }
  void step() {
    if (!sgd) sgd = std::make_unique<Optimizer>(model, PlainTraining::rule());
    model.step(*sgd, {.asynchronous = is_asynchronous});
    plain.step();
  }
  void synchronize() {
    model.synchronize();
    plain.publish();
  }
  // The model alone. Throws what it throws, now or from the backward.
  void call_alone(uint64_t number = 1000) {
    const Sample batch = sample(number);
    model.forward_backward(batch.inputs, batch.labels, squared_error);
    synchronize();
  }
  // The newest weights, and the buffers.
  std::vector<Tensor> state() {
    synchronize();
    std::vector<Tensor> state = copies_of(chain.parameters());
    for (const Tensor& buffer : chain.buffers()) state.push_back(buffer.clone());
    return state;
  }
  // Whether two more calls and a step have the bits of the plain loop.
  bool goes_on() {
    bool same = call(500) && call(501);
    step();
    same = same && call(502);
    return same && alike(state(), plain.state());
  }

  Chain chain;
  PlainTraining plain;
  Model model;
  std::unique_ptr<Optimizer> sgd;
  bool is_asynchronous;
};

}  // namespace roundpipe::support
