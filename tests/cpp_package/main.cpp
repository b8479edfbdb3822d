// Trains a model of two layers for one step, on two virtual devices and by a plain loop, and compares bits.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/randn.h>

#include <roundpipe/device/device_spec.h>
#include <roundpipe/runtime/pipeline.h>

using namespace roundpipe;

namespace {

constexpr int64_t kWidth = 8;

struct Linear final : runtime::Layer {
  struct Shell final : runtime::LayerShell {
    explicit Shell(const at::TensorOptions& options) {
      for (int i = 0; i < 2; ++i) parameters.push_back(at::empty({0}, options));
    }
    runtime::Values forward(const runtime::Values& inputs, const runtime::LayerContext&) override {
      return {{at::linear(inputs.tensors[0], parameters[0], parameters[1])}, inputs.structure};
    }
  };

  at::Tensor weight = at::randn({kWidth, kWidth}).requires_grad_();
  at::Tensor bias = at::randn({kWidth}).requires_grad_();

  std::string name() const override { return "linear"; }
  std::vector<memory::NamedTensor> parameters() const override { return {{"weight", weight}, {"bias", bias}}; }
  std::vector<memory::NamedTensor> buffers() const override { return {}; }
  std::unique_ptr<runtime::LayerShell> make_shell(c10::Device device) override {
    return std::make_unique<Shell>(at::TensorOptions().device(device));
  }
};

struct Squares final : runtime::Loss {
  std::vector<at::Tensor> operator()(const runtime::Values& outputs, const runtime::Values&,
                                     const runtime::LayerContext&) override {
    return {outputs.tensors[0].square().sum()};
  }
};

template <typename Expected>
bool throws(const std::string& message, auto action) {
  try {
    action();
  } catch (const Expected& error) {
    return std::string(error.what()).find(message) != std::string::npos;
  }
  return false;
}

}  // namespace

int main() {
  at::manual_seed(1);
  const std::vector<at::Tensor> batch{at::randn({4, kWidth}), at::randn({4, kWidth})};

  std::vector<at::Tensor> leaves;
  std::vector<at::Tensor> expected;
  std::vector<std::unique_ptr<runtime::Layer>> layers;
  for (int i = 0; i < 2; ++i) {
    auto layer = std::make_unique<Linear>();
    for (const at::Tensor& parameter : {layer->weight, layer->bias}) {
      leaves.push_back(parameter);
      expected.push_back(parameter.detach().clone().requires_grad_());
    }
    layers.push_back(std::move(layer));
  }

  runtime::Engine::set_current(device::parse_devices("virtual:2"));
  const auto pipeline = std::make_shared<runtime::Pipeline>("application", std::move(layers), /*pinned=*/false);
  runtime::CallOptions options;
  options.microbatches = static_cast<int>(batch.size());
  std::vector<runtime::Values> inputs;
  for (const at::Tensor& microbatch : batch) inputs.push_back({{microbatch}, nullptr});
  const auto train = [&] {
    const auto result = pipeline->forward_backward(inputs, std::vector<runtime::Values>(batch.size()),
                                                   std::make_shared<Squares>(), /*keep_outputs=*/false, options, {});
    pipeline->drain();
    return result;
  };
  const auto result = train();
  pipeline->expose();

  bool same = true;
  for (size_t i = 0; i < batch.size(); ++i) {
    const at::Tensor middle = at::linear(batch[i], expected[0], expected[1]);
    const at::Tensor loss = at::linear(middle, expected[2], expected[3]).square().sum();
    loss.backward();
    same &= loss.equal(result.losses[i][0]);
  }
  for (size_t i = 0; i < leaves.size(); ++i) same &= leaves[i].grad().equal(expected[i].grad());
  std::printf("losses and gradients of a plain loop: %s\n", same ? "yes" : "no");

  // Types of exceptions are the same on both sides.
  runtime::Engine::set_current(device::parse_devices("virtual:1,fail=error@2"));
  bool caught = throws<DeviceError>("[virtual:0] the device failed", train);
  caught &= throws<std::invalid_argument>("virtual:none", [] { device::parse_devices("virtual:none"); });
  std::printf("errors of the engine: %s\n", caught ? "caught" : "not caught");
  return same && caught ? 0 : 1;
}
