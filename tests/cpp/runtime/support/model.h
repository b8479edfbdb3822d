#pragma once

#include <cmath>
#include <cstring>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/grad_mode.h>

#include <roundpipe/runtime/model/random.h>
#include <roundpipe/runtime/model_optimizer.h>
#include <roundpipe/runtime/pipeline.h>

#include "layers.h"

namespace roundpipe::runtime::support {

using roundpipe::RecomputeGrain;
using roundpipe::RunOptions;
using roundpipe::StepOptions;

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const at::Tensor x = a.detach().contiguous(), y = b.detach().contiguous();
  return x.nbytes() == 0 || std::memcmp(x.data_ptr(), y.data_ptr(), x.nbytes()) == 0;
}

inline bool same_bits(const Tensors& a, const Tensors& b) {
  bool same = a.size() == b.size();
  for (size_t i = 0; same && i < a.size(); ++i) same = same_bits(a[i], b[i]);
  return same;
}

// Mean squared distance to the label, plus the mean of the activations, which draws nothing.
class SquaredLoss final : public Loss {
 public:
  explicit SquaredLoss(std::shared_ptr<Fault> fault = nullptr) : fault_(std::move(fault)) {}
  Tensors operator()(const Values& outputs, const Values& label, const LayerContext&) override {
    if (fault_) fault_->pass("loss");
    return {at::mse_loss(outputs.tensors[0], label.tensors[0]), outputs.tensors[0].mean() * 0.5};
  }

 private:
  const std::shared_ptr<Fault> fault_;
};

// The options, with this route.
inline RunOptions along(Route route, RunOptions options = {}) {
  options.route = std::move(route);
  return options;
}

struct Batch {
  std::vector<Values> inputs;  // per microbatch
  std::vector<Values> labels;
};

inline Batch make_batch(int microbatches, int64_t rows, int64_t width) {
  Batch batch;
  for (int m = 0; m < microbatches; ++m) {
    batch.inputs.push_back({{at::randn({rows, width}), at::rand({rows, 1}).gt(0.2).to(at::kFloat)}, nullptr});
    batch.labels.push_back({{at::randn({rows, width})}, nullptr});
  }
  return batch;
}

// One step of SGD on fp32 values, with one rounding like the fused kernels: torch's add_ rounds twice if its kernels
// were compiled without fused multiply-add.
inline void descend(at::Tensor& values, const at::Tensor& gradient, double rate) {
  const at::Tensor dense = values.contiguous(), slope = gradient.to(at::kFloat).contiguous();
  float* value = dense.mutable_data_ptr<float>();
  const float* each = slope.const_data_ptr<float>();
  for (int64_t i = 0; i < dense.numel(); ++i) value[i] = std::fma(each[i], static_cast<float>(-rate), value[i]);
  if (!dense.is_same(values)) values.copy_(dense);
}

// The slow, plain way: the same layers in one loop on the caller's thread, one microbatch after the other, no
// recompute, gradients summed by autograd, and an explicit step protocol. Layers that share a parameter read copies of
// it, so that each has its own sum.
class PlainModel {
 public:
  PlainModel(std::string name, const std::vector<LayerSpec>& layers) : name_(std::move(name)) {
    for (const LayerSpec& spec : layers) {
      Layer& layer = layers_.emplace_back();
      layer.body = spec.body;
      for (const memory::NamedTensor& parameter : spec.parameters) {
        Parameter& known = own(parameter.tensor);
        known.readers.emplace_back(layers_.size() - 1, layer.parameters.size());
        layer.parameters.push_back(known.mine);
        layer.read.push_back(known.mine);
      }
      for (const memory::NamedTensor& buffer : spec.buffers) layer.buffers.push_back(buffer.tensor.clone());
    }
    for (Parameter& parameter : parameters_) {
      if (parameter.readers.size() == 1) continue;
      for (const auto& [layer, index] : parameter.readers) {
        const bool trains = parameter.mine.requires_grad();
        parameter.copies.push_back(parameter.mine.detach().clone().set_requires_grad(trains));
        layers_[layer].read[index] = parameter.copies.back();
      }
    }
  }

  struct Result {
    std::vector<Tensors> losses;
    std::vector<Tensors> outputs;
  };

  // Forward, loss and backward. Gradients add up in the parameters' .grad.
  Result forward_backward(const Batch& batch, uint64_t call) {
    Result result;
    for (size_t m = 0; m < batch.inputs.size(); ++m) {
      const Tensors outputs = forward(batch.inputs[m].tensors, call, static_cast<int>(m));
      SquaredLoss loss;
      const Tensors losses = loss({outputs, nullptr}, batch.labels[m], {});
      at::Tensor total = losses[0] + losses[1];
      torch::autograd::backward({total}, {});
      result.losses.push_back({losses[0].detach(), losses[1].detach()});
      result.outputs.push_back(detached(outputs));
    }
    gather();
    return result;
  }

  // Adds the gradients of layers that share a parameter, from the last layer to the first, then the earlier sum.
  void gather() {
    const at::NoGradGuard no_grad;
    for (Parameter& parameter : parameters_) {
      at::Tensor sum;
      for (auto copy = parameter.copies.rbegin(); copy != parameter.copies.rend(); ++copy) {
        const at::Tensor gradient = copy->grad();
        if (gradient.defined()) sum = sum.defined() ? sum + gradient : gradient;
        copy->mutable_grad().reset();
      }
      if (!sum.defined()) continue;
      at::Tensor& before = parameter.mine.mutable_grad();
      before = before.defined() ? before + sum : sum;
    }
  }

  Tensors forward(Tensors values, uint64_t call, int microbatch) {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    values[0] = values[0].clone();  // a layer may write to it
    for (size_t l = 0; l < layers_.size(); ++l) {
      LayerContext context;
      context.layer = static_cast<int>(l);
      context.microbatch = microbatch;
      const at::Tensor state = generator.get_state();
      const uint64_t seed = layer_seed(generator.current_seed(), name_, call, microbatch, context.layer);
      generator.set_current_seed(seed);
      values = layers_[l].body(values, layers_[l].read, layers_[l].buffers, context);
      generator.set_state(state);
    }
    return values;
  }

  // Steps the optimizer's parameters; calls read the result after publish().
  void update(double rate) {
    const at::NoGradGuard no_grad;
    for (Parameter& parameter : parameters_) {
      at::Tensor& gradient = parameter.mine.mutable_grad();
      if (gradient.defined()) descend(parameter.master, gradient, rate);
      gradient.reset();
    }
    unpublished_ = true;
  }
  void scale_gradients(double factor) {
    const at::NoGradGuard no_grad;
    for (Parameter& parameter : parameters_) {
      if (parameter.mine.grad().defined()) parameter.mine.mutable_grad().mul_(factor);
    }
  }
  void publish() {
    if (!unpublished_) return;
    unpublished_ = false;
    const at::NoGradGuard no_grad;
    for (Parameter& parameter : parameters_) {
      parameter.mine.copy_(parameter.master);
      for (at::Tensor& copy : parameter.copies) copy.copy_(parameter.master);
    }
  }

  at::Tensor parameter(size_t layer, size_t index) const { return layers_[layer].parameters[index]; }
  const Tensors& buffers(size_t layer) const { return layers_[layer].buffers; }
  size_t size() const { return layers_.size(); }
  static Tensors detached(const Tensors& tensors) {
    Tensors result;
    for (const at::Tensor& tensor : tensors) result.push_back(tensor.detach());
    return result;
  }

 private:
  struct Layer {
    Body body;
    Tensors parameters;
    Tensors read;  // the same, or copies of those that others share
    Tensors buffers;
  };
  struct Parameter {
    const void* original;
    at::Tensor mine;
    at::Tensor master;
    std::vector<std::pair<size_t, size_t>> readers;  // layer, and which of its parameters
    Tensors copies;                                  // one for each, where there are several
  };

  Parameter& own(const at::Tensor& original) {
    for (Parameter& parameter : parameters_) {
      if (parameter.original == original.unsafeGetTensorImpl()) return parameter;
    }
    const at::Tensor mine = original.detach().clone().set_requires_grad(original.requires_grad());
    return parameters_.emplace_back(Parameter{original.unsafeGetTensorImpl(), mine, mine.detach().clone(), {}, {}});
  }

  const std::string name_;
  std::vector<Layer> layers_;
  std::vector<Parameter> parameters_;
  bool unpublished_ = false;
};

// A pipeline with an optimizer, stepped as the Python package does it: either a fused optimizer, or one whose update
// runs on its own thread and is published at the next step, or at once in a synchronous step.
class PipedModel {
 public:
  PipedModel(std::string name, const std::vector<LayerSpec>& layers, bool fused = false) : layers_(layers) {
    std::vector<std::unique_ptr<Layer>> made;
    for (const LayerSpec& spec : layers) made.push_back(std::make_unique<NativeLayer>(spec));
    pipeline_ = std::make_shared<Pipeline>(std::move(name), std::move(made), /*pinned=*/false);
    if (fused) {
      std::vector<std::vector<int>> groups;
      for (const BlockState& block : pipeline_->model().blocks) {
        std::vector<int>& members = groups.emplace_back();
        for (const memory::NamedTensor& parameter : block.block->parameters())
          members.push_back(parameter.tensor.requires_grad() ? 0 : -1);
      }
      optimizer_ = std::make_unique<ModelOptimizer>(std::vector<std::shared_ptr<Pipeline>>{pipeline_},
                                                    std::vector<std::vector<std::vector<int>>>{groups},
                                                    optim::Algorithm::kSGD, optim::MomentFormat::kFloat32);
      return;
    }
    std::vector<Tensors> optimizer_parameters;
    for (const BlockState& block : pipeline_->model().blocks) {
      Tensors& mine = optimizer_parameters.emplace_back();
      for (const memory::NamedTensor& parameter : block.block->parameters()) {
        const bool trainable = parameter.tensor.requires_grad();
        mine.push_back(trainable ? parameter.tensor.detach().clone().set_requires_grad(true) : parameter.tensor);
        if (trainable) masters_.push_back(mine.back());
      }
    }
    pipeline_->weights().set_optimizer_parameters(std::move(optimizer_parameters));
  }
  ~PipedModel() {
    if (update_.valid()) update_.wait();
  }

  Pipeline& pipeline() { return *pipeline_; }
  const std::vector<LayerSpec>& layers() const { return layers_; }
  // REQUIRES: fused.
  ModelOptimizer& optimizer() { return *optimizer_; }

  std::shared_ptr<StepRun> fused_step(double rate, const StepOptions& options, double loss_scale = 0) {
    optim::Hyperparameters hyper;
    hyper.lr = rate;
    return optimizer_->step({hyper}, options, loss_scale);
  }

  void step(double rate, bool asynchronous) {
    if (optimizer_) {
      fused_step(rate, {asynchronous});
      return;
    }
    finish_update();
    pipeline_->raise_pending();
    std::shared_ptr<StepTicket> ticket = pipeline_->begin_step();
    const bool publish = std::exchange(unpublished_, false);
    std::unique_ptr<WeightUpdate> weights;
    if (publish) weights = pipeline_->weights().begin_update(/*in_place=*/false);
    update_ = std::async(std::launch::async, [this, ticket = std::move(ticket), weights = std::move(weights), rate] {
      if (weights) weights->make();
      if (!ticket->hand_over()) return false;
      const at::NoGradGuard no_grad;
      for (at::Tensor& master : masters_) {
        at::Tensor& gradient = master.mutable_grad();
        if (gradient.defined()) descend(master, gradient, rate);
        gradient.reset();
      }
      return true;
    });
    if (asynchronous) return;
    finish_update();
    pipeline_->drain();
    publish_now();
  }

  // Waits until everything is done, published and shown in the user's parameters.
  void synchronize() {
    finish_update();
    pipeline_->drain();
    if (optimizer_) optimizer_->finish();
    publish_now();
    pipeline_->expose();
  }

 private:
  void finish_update() {
    if (update_.valid()) unpublished_ |= update_.get();
  }
  void publish_now() {
    if (!std::exchange(unpublished_, false)) return;
    pipeline_->weights().begin_update(/*in_place=*/true)->make();
  }

  const std::vector<LayerSpec> layers_;
  std::shared_ptr<Pipeline> pipeline_;
  std::unique_ptr<ModelOptimizer> optimizer_;
  Tensors masters_;
  std::future<bool> update_;
  bool unpublished_ = false;
};

// Whether the user's parameters, gradients and (if asked for) buffers equal those of the plain loop.
inline bool same_state(PipedModel& piped, const PlainModel& plain, bool with_buffers) {
  for (size_t l = 0; l < plain.size(); ++l) {
    const LayerSpec& layer = piped.layers()[l];
    for (size_t i = 0; i < layer.parameters.size(); ++i) {
      const at::Tensor expected = plain.parameter(l, i);
      if (!same_bits(layer.parameters[i].tensor, expected)) return false;
      if (!same_bits(layer.parameters[i].tensor.grad(), expected.grad())) return false;
    }
    for (size_t i = 0; with_buffers && i < layer.buffers.size(); ++i) {
      if (!same_bits(layer.buffers[i].tensor, plain.buffers(l)[i])) return false;
    }
  }
  return true;
}

inline std::vector<schedule::Range> ascending(std::initializer_list<int> cuts) {
  std::vector<schedule::Range> stages;
  for (auto cut = cuts.begin(); cut + 1 < cuts.end(); ++cut) stages.push_back({*cut, *(cut + 1)});
  return stages;
}

// Fused stages: forward stages between `cuts`, and backward stages between the same cuts, of which the last is fused.
inline schedule::Stages fused_stages(std::initializer_list<int> cuts) {
  schedule::Stages stages;
  stages.forward = ascending(cuts);
  stages.backward = {stages.forward.rbegin(), stages.forward.rend()};
  stages.forward.pop_back();
  return stages;
}
inline schedule::Stages train_stages(std::initializer_list<int> cuts) {
  schedule::Stages stages;
  stages.forward = ascending(cuts);
  stages.backward = {stages.forward.rbegin(), stages.forward.rend()};
  return stages;
}

inline std::shared_ptr<Engine> use_devices(const std::string& text) {
  return Engine::set_current(device::parse_devices(text));
}

// The host side of a model of native layers.
inline std::shared_ptr<ModelState> make_model(const std::vector<LayerSpec>& layers) {
  std::vector<std::unique_ptr<Layer>> made;
  for (const LayerSpec& spec : layers) made.push_back(std::make_unique<NativeLayer>(spec));
  return std::make_shared<ModelState>("model", std::move(made), /*pinned=*/false);
}

}  // namespace roundpipe::runtime::support
