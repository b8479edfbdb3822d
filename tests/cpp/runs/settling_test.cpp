// What lets calls read the weights of an asynchronous step at once, and what leaves them one step behind.
#include <filesystem>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <unistd.h>

#include <roundpipe/roundpipe.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/linear.h>

using namespace roundpipe;
namespace nn = torch::nn;

namespace settling_test {

struct Training {
  Training() : layers(seeded()), model(layers), optimizer(model, torch::optim::AdamWOptions(0.05)) {
    model.run_options().microbatches = 2;
  }
  static nn::Sequential seeded() {
    at::manual_seed(3);
    return nn::Sequential{nn::Linear(6, 6), nn::Tanh(), nn::Linear(6, 1)};
  }
  static at::Tensor loss(const at::Tensor& outputs) { return outputs.square().sum(); }
  double step() {
    const double value = model.forward_backward(batch, std::tuple<>(), loss).loss.item<double>();
    model.step(optimizer);
    return value;
  }

  nn::Sequential layers;
  Model model;
  Optimizer optimizer;
  at::Tensor batch = at::randn({4, 6});
};

using Between = std::function<void(Training&)>;

std::vector<double> losses_with(const Between& between) {
  Training training;
  std::vector<double> losses;
  for (int i = 0; i < 6; ++i) {
    losses.push_back(training.step());
    if (i == 2) between(training);
  }
  return losses;
}

TEST_CASE("settling: what looks at a training leaves its losses as they are") {
  set_devices("virtual:2");
  const std::string folder =
      (std::filesystem::temp_directory_path() / concat("roundpipe_settling_", getpid())).string();
  const std::vector<double> expected = losses_with([](Training&) {});
  const std::map<std::string, Between> looks = {
      {"predict_memory", [](Training& own) { own.model.predict_memory(own.batch, std::tuple<>(), Training::loss); }},
      {"named_parameters",
       [](Training& own) { CHECK(own.model.named_parameters()[0].second.isfinite().all().item<bool>()); }},
      {"printing",
       [](Training& own) {
         std::ostringstream text;
         text << own.layers << own.model.named_parameters()[0].second;
         CHECK(text.str().find("Linear") != std::string::npos);
       }},
      {"last_records", [](Training& own) { (void)own.model.last_records(); }},
      {"costs", [](Training& own) { (void)own.model.costs(); }},
      {"save_checkpoint",
       [&](Training& own) { save_checkpoint(folder, own.model, own.optimizer, {.overwrite = true, .wait = true}); }},
  };
  for (const auto& [name, look] : looks) {
    CAPTURE(name);
    CHECK(losses_with(look) == expected);
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("settling: synchronize lets the next call read the newest weights") {
  set_devices("virtual:2");
  const std::vector<double> expected = losses_with([](Training&) {});
  const std::vector<double> settled = losses_with([](Training& own) { own.model.synchronize(); });
  CHECK(std::vector(settled.begin(), settled.begin() + 3) == std::vector(expected.begin(), expected.begin() + 3));
  CHECK(settled[3] != expected[3]);
}

TEST_CASE("settling: a model that is dropped leaves the newest weights, though older ones were looked at") {
  set_devices("virtual:2");
  const auto left = [](const Between& between) {
    nn::Sequential layers = nullptr;
    {
      Training training;
      layers = training.layers;
      for (int i = 0; i < 3; ++i) training.step();
      between(training);
    }
    return layers->parameters()[0].detach().clone();
  };
  const at::Tensor newest = left([](Training& own) { own.model.synchronize(); });
  CHECK(at::equal(left([](Training&) {}), newest));
  CHECK(at::equal(left([](Training& own) { (void)own.model.named_parameters(); }), newest));
}

}  // namespace settling_test
