// Trains a classifier of images, made of torch::nn modules, whose weights stay on the host.
//
//   ./classifier
//   ROUNDPIPE_DEVICES=virtual:4 ./classifier 200
//
// The images are made here: noise with a bright bar whose place and direction are the class. The argument is the number
// of steps.

#include <cstdio>
#include <cstdlib>

#include <roundpipe/roundpipe.h>
#include <torch/torch.h>

namespace nn = torch::nn;
using torch::Tensor;

namespace {

constexpr int64_t kSide = 12;
constexpr int64_t kClasses = 8;

// A class of the user's own: two convolutions around which the input is added. Deriving from Cloneable lets RoundPipe
// make an instance for each device; reset() makes everything that an instance has of its own.
struct ResidualImpl : nn::Cloneable<ResidualImpl> {
  explicit ResidualImpl(int64_t channels) : channels(channels) { reset(); }

  void reset() override {
    const auto options = nn::Conv2dOptions(channels, channels, 3).padding(1).bias(false);
    first = register_module("first", nn::Conv2d(options));
    norm = register_module("norm", nn::BatchNorm2d(channels));
    second = register_module("second", nn::Conv2d(options));
  }

  Tensor forward(const Tensor& x) { return x + second(torch::relu(norm(first(x)))); }

  int64_t channels;
  nn::Conv2d first{nullptr}, second{nullptr};
  nn::BatchNorm2d norm{nullptr};
};
TORCH_MODULE(Residual);

struct Images {
  Tensor pixels;  // [n, 1, side, side]
  Tensor classes;
};

Images make_images(int64_t n) {
  Images images{torch::randn({n, 1, kSide, kSide}), torch::randint(kClasses, {n})};
  for (int64_t i = 0; i < n; ++i) {
    const int64_t kind = images.classes[i].item<int64_t>();
    const int64_t place = 1 + 3 * (kind / 2);
    images.pixels[i][0].select(kind % 2, place).add_(2.5);
  }
  return images;
}

double accuracy(roundpipe::Model& model, nn::Sequential& layers, const Images& images) {
  const torch::NoGradGuard no_grad;
  layers->eval();
  const Tensor guesses = model.forward(images.pixels).argmax(1);
  layers->train();
  return (guesses == images.classes).to(torch::kDouble).mean().item<double>();
}

}  // namespace

int main(int argc, char** argv) {
  const int steps = argc > 1 ? std::atoi(argv[1]) : 60;
  torch::manual_seed(0);

  nn::Sequential layers{nn::Conv2d(nn::Conv2dOptions(1, 16, 3).padding(1)),
                        nn::Functional(torch::relu),
                        Residual(16),
                        Residual(16),
                        nn::Flatten(),
                        nn::Dropout(0.1),
                        nn::Linear(16 * kSide * kSide, kClasses)};
  roundpipe::Model model(layers);
  roundpipe::Optimizer optimizer(model, torch::optim::AdamWOptions(2e-3));
  optimizer.set_learning_rate(roundpipe::cosine_rate(steps / 10, steps));

  const Images held_out = make_images(256);
  for (int step = 0; step < steps; ++step) {
    const Images batch = make_images(64);
    const auto result =
        model.forward_backward(batch.pixels, batch.classes, [](const Tensor& outputs, const Tensor& label) {
          return torch::nn::functional::cross_entropy(
                     outputs, label, torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum)) /
                 64;
        });
    model.step(optimizer, {.max_grad_norm = 1.0});
    if (step % 10 == 0 || step + 1 == steps) std::printf("step %3d  loss %.4f\n", step, result.loss.item<double>());
  }
  model.synchronize();
  std::printf("right on held-out images: %.1f %%\n", 100 * accuracy(model, layers, held_out));
}
