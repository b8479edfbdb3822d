// Trains a model of two layers for one step, on two virtual devices and by a plain loop, and compares bits.
#include <cstdio>
#include <stdexcept>
#include <string>
#include <vector>

#include <roundpipe/roundpipe.h>
#include <torch/torch.h>

using namespace roundpipe;

namespace {

constexpr int64_t kWidth = 8;

at::Tensor squares(const at::Tensor& outputs) { return outputs.square().sum(); }

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
  torch::manual_seed(1);
  const at::Tensor batch = torch::randn({8, kWidth});
  torch::nn::Linear first(kWidth, kWidth), second(kWidth, kWidth);
  std::vector<at::Tensor> expected;
  for (const auto& layer : {first, second}) {
    for (const at::Tensor& parameter : layer->parameters())
      expected.push_back(parameter.detach().clone().requires_grad_());
  }

  set_devices("virtual:2");
  torch::nn::Sequential layers(first, second);
  Model model(layers, {.run = {.microbatches = 2}});
  const TrainResult result = model.forward_backward(batch, std::tuple<>(), squares);

  at::Tensor sum;
  for (const at::Tensor& part : batch.chunk(2)) {
    const at::Tensor middle = torch::linear(part, expected[0], expected[1]);
    const at::Tensor loss = squares(torch::linear(middle, expected[2], expected[3]));
    loss.backward();
    sum = sum.defined() ? sum + loss.detach() : loss.detach();
  }
  bool same = sum.equal(result.loss);
  const std::vector<at::Tensor> trained = layers->parameters();
  for (size_t i = 0; i < trained.size(); ++i) same &= trained[i].grad().equal(expected[i].grad());
  std::printf("losses and gradients of a plain loop: %s\n", same ? "yes" : "no");

  // Types of exceptions are the same on both sides.
  bool caught = throws<std::invalid_argument>("virtual:none", [] { set_devices("virtual:none"); });
  caught &= throws<BudgetExceeded>("does not fit on the host", [&] { Model(layers, {.host_memory = 1}); });
  set_devices("virtual:1,fail=error@2");
  caught &= throws<DeviceError>("[virtual:0] the device failed", [&] {
    model.forward_backward(batch, std::tuple<>(), squares);
    model.synchronize();
  });
  std::printf("errors of the engine: %s\n", caught ? "caught" : "not caught");
  return same && caught ? 0 : 1;
}
