#pragma once

#include <functional>
#include <string>
#include <vector>

#include <roundpipe/roundpipe.h>
#include <torch/nn.h>
#include <torch/optim.h>
#include <torch/utils.h>

namespace roundpipe::support {

using at::Tensor;

inline bool same_bits(const Tensor& a, const Tensor& b) {
  if (!a.defined() || !b.defined()) return a.defined() == b.defined();
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() && at::equal(a, b);
}

// Seeds torch's default generator for one execution of a layer.
inline void seed_for(const Model& model, uint64_t call, size_t microbatch, int layer) {
  at::manual_seed(model.layer_seed(call, static_cast<int>(microbatch), layer));
}

// Runs `layers` on each microbatch of `inputs`, with one loss and backward after the other, as a plain loop does.
// Returns the losses' sum. 16-bit gradients are summed in fp32, as the engine sums them, and rounded once.
struct PlainStep {
  std::vector<std::function<Tensor(Tensor)>> layers;
  std::function<Tensor(const Tensor&, const Tensor&)> loss;
  std::vector<Tensor> parameters;

  Tensor run(const Model& model, uint64_t call, const Tensor& inputs, const Tensor& labels, int64_t count) const {
    Tensor total;
    std::vector<Tensor> sums(parameters.size());
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (parameters[i].grad().defined()) sums[i] = parameters[i].grad().to(at::kFloat);
    }
    const std::vector<Tensor> parts = at::tensor_split(inputs, count);
    const std::vector<Tensor> label_parts = at::tensor_split(labels, count);
    for (size_t m = 0; m < parts.size(); ++m) {
      Tensor hidden = parts[m];
      for (size_t l = 0; l < layers.size(); ++l) {
        seed_for(model, call, m, static_cast<int>(l));
        hidden = layers[l](hidden);
      }
      seed_for(model, call, m, static_cast<int>(layers.size()));
      const Tensor own = loss(hidden, label_parts[m]);
      for (const Tensor& parameter : parameters) parameter.mutable_grad() = Tensor();
      own.backward();
      for (size_t i = 0; i < parameters.size(); ++i) {
        const Tensor gradient = parameters[i].grad();
        if (!gradient.defined()) continue;
        sums[i] = sums[i].defined() ? sums[i] + gradient.to(at::kFloat) : gradient.to(at::kFloat);
      }
      total = total.defined() ? total + own.detach() : own.detach();
    }
    for (size_t i = 0; i < parameters.size(); ++i) {
      parameters[i].mutable_grad() = sums[i].defined() ? sums[i].to(parameters[i].scalar_type()) : Tensor();
    }
    return total;
  }
};

// The children of a Sequential, as functions.
inline std::vector<std::function<Tensor(Tensor)>> bodies(const torch::nn::Sequential& layers) {
  std::vector<std::function<Tensor(Tensor)>> bodies;
  for (const torch::nn::AnyModule& child : *layers) {
    bodies.emplace_back([own = child](Tensor x) mutable { return own.forward(std::move(x)); });
  }
  return bodies;
}

// Two modules with the same values.
template <typename Holder>
Holder twin_of(const Holder& module) {
  return Holder(std::dynamic_pointer_cast<typename Holder::ContainedType>(module->clone()));
}

inline bool same_state(const std::vector<Tensor>& a, const std::vector<Tensor>& b) {
  if (a.size() != b.size()) return false;
  for (size_t i = 0; i < a.size(); ++i) {
    if (!same_bits(a[i], b[i])) return false;
  }
  return true;
}

inline std::vector<Tensor> gradients_of(const std::vector<Tensor>& parameters) {
  std::vector<Tensor> gradients;
  for (const Tensor& parameter : parameters) gradients.push_back(parameter.grad());
  return gradients;
}

}  // namespace roundpipe::support
