// A training that Python's tests have a twin of: test_checkpoints_of_cpp.py.
//   checkpointed_training FOLDER fused|torch float32|bfloat16 DEVICES STEPS [resume]
// Prints each step's loss, and saves a checkpoint at the end.
#include <cstdio>
#include <string>

#include <roundpipe/roundpipe.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

using namespace roundpipe;
namespace nn = torch::nn;

int main(int /*count*/, char** arguments) {
  const std::string folder = arguments[1], optimizer_kind = arguments[2], dtype_name = arguments[3];
  const at::ScalarType dtype = dtype_name == "float32" ? at::kFloat : at::kBFloat16;
  set_devices(arguments[4]);
  at::manual_seed(7);
  nn::Sequential layers{nn::Linear(5, 9), nn::Tanh(), nn::Dropout(0.2), nn::Linear(9, 3)};
  layers->to(dtype);
  Model model(layers);
  model.run_options().microbatches = 3;
  const auto loss = [](const at::Tensor& outputs, const at::Tensor& label) {
    return (outputs - label).to(at::kFloat).square().sum();
  };
  const auto call = [&] {
    const at::Tensor batch = at::randn({8, 5}), labels = at::randn({8, 3});
    std::printf("%a\n", model.forward_backward(batch.to(dtype), labels, loss).loss.item<double>());
  };
  const int steps = std::stoi(arguments[5]);
  const bool resumes = arguments[6] != nullptr;
  int64_t step = 0;
  if (optimizer_kind == "fused") {
    Optimizer optimizer(model, torch::optim::AdamWOptions(0.02).weight_decay(0.01));
    optimizer.set_learning_rate([](int64_t done) { return 1 / (1 + 0.25 * static_cast<double>(done)); });
    if (resumes) {
      const Loaded loaded = load_checkpoint(folder, model, optimizer);
      std::printf("%s %ld\n", loaded.value("note").as_string().c_str(),
                  loaded.value("array").as_tensor().sum().item<int64_t>());
    }
    for (int i = 0; i < steps; ++i) {
      call();
      model.step(optimizer);
    }
    save_checkpoint(folder, model, optimizer,
                    {.state = {{"note", "from C++"}, {"array", at::arange(4)}}, .wait = true});
    return 0;
  }
  torch::optim::SGD optimizer(layers->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  if (resumes) step = load_checkpoint(folder, model, optimizer).step;
  for (int i = 0; i < steps; ++i) {
    call();
    model.step(optimizer);
    ++step;
  }
  save_checkpoint(folder, model, optimizer, {.step = step, .wait = true});
  return 0;
}
