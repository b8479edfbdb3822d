#include <doctest/doctest.h>

#include <roundpipe/roundpipe.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>

#include "../temporary_folder.h"

using namespace roundpipe;
using at::Tensor;
namespace nn = torch::nn;

namespace {

// Two modules in the pipeline and two on the host, one of which has buffers.
struct SavedGroup {
  SavedGroup() {
    first.run_options().microbatches = 2;
    optimizer.set_learning_rate(linear_rate(2, 20));
  }
  double call() {
    const Tensor batch = at::randn({6, 5});
    const Tensor loss = scaler.scale(second.forward(norm(bridge(first.forward(batch)))).square().sum());
    loss.backward();
    return loss.item<double>();
  }
  std::vector<double> run(int steps) {
    std::vector<double> losses;
    for (int i = 0; i < steps; ++i) {
      losses.push_back(call());
      optimizer.step({.max_grad_norm = 5, .scaler = &scaler});
    }
    return losses;
  }
  std::vector<Tensor> state() {
    first.synchronize();
    std::vector<Tensor> all;
    for (const auto& part :
         {encoder->parameters(), bridge->parameters(), norm->parameters(), norm->buffers(), decoder->parameters()}) {
      for (const Tensor& tensor : part) all.push_back(tensor.detach().clone());
    }
    return all;
  }
  ModelGroup group() {
    ModelGroup group{{{"encoder", &first}, {"decoder", &second}}};
    for (const auto& each : bridge->named_parameters()) group.parameters.emplace_back("bridge." + each.key(), *each);
    for (const auto& each : norm->named_parameters()) group.parameters.emplace_back("norm." + each.key(), *each);
    for (const auto& each : norm->named_buffers()) group.buffers.emplace_back("norm." + each.key(), *each);
    return group;
  }

  nn::Sequential encoder{nn::Linear(5, 9), nn::Tanh(), nn::Dropout(0.2), nn::Linear(9, 8)};
  nn::Linear bridge{8, 8};
  nn::BatchNorm1d norm{8};
  nn::Sequential decoder{nn::Linear(8, 3)};
  Model first{encoder, {.name = "encoder"}}, second{decoder, {.name = "decoder"}};
  Optimizer optimizer{group(), torch::optim::AdamWOptions(0.02)};
  GradScaler scaler{{.init_scale = 64, .growth_interval = 2}};
};

}  // namespace

TEST_SUITE("checkpoint of a group") {
  TEST_CASE("a training that is loaded goes on with the same bits, on other devices") {
    const support::TemporaryFolder folder;
    set_devices("virtual:3");
    at::manual_seed(1);
    SavedGroup whole;
    whole.run(3);
    whole.call();  // gradients that no step has consumed
    const SaveOptions saving{.scaler = &whole.scaler, .wait = true};
    save_checkpoint(folder.path(), whole.group(), whole.optimizer, saving);
    const std::vector<double> expected = whole.run(3);
    const std::vector<Tensor> at_end = whole.state();

    set_devices("virtual:2");
    at::manual_seed(2);
    SavedGroup resumed;
    const Loaded loaded =
        load_checkpoint(folder.path(), resumed.group(), resumed.optimizer, {.scaler = &resumed.scaler});
    CHECK(loaded.step == 3);
    CHECK(resumed.run(3) == expected);
    const std::vector<Tensor> state = resumed.state();
    REQUIRE(state.size() == at_end.size());
    for (size_t i = 0; i < state.size(); ++i) CHECK(at::equal(state[i], at_end[i]));

    // Its weights alone, also into one of its models.
    SavedGroup fresh;
    load_weights(folder.path(), fresh.group());
    nn::Sequential part{nn::Linear(5, 9), nn::Tanh(), nn::Dropout(0.2), nn::Linear(9, 8)};
    Model encoder(part, {.name = "part"});
    load_weights(folder.path(), ModelGroup{{{"encoder", &encoder}}}, /*strict=*/false);
    CHECK(at::equal(part->parameters()[0], fresh.encoder->parameters()[0]));
  }

  TEST_CASE("a parameter of the program may have two names") {
    const support::TemporaryFolder folder;
    set_devices("virtual:1");
    Model encoder(nn::Sequential{nn::Linear(4, 4)});
    nn::Linear bridge(4, 4);
    const ModelGroup group{{{"encoder", &encoder}}, {{"one", bridge->weight}, {"other", bridge->weight}}};
    Optimizer optimizer(group, torch::optim::SGDOptions(0.1));
    const Tensor saved = bridge->weight.detach().clone();
    save_checkpoint(folder.path(), group, optimizer, {.step = 1, .wait = true});
    {
      const at::NoGradGuard no_grad;
      bridge->weight.zero_();
    }
    load_checkpoint(folder.path(), group, optimizer);
    CHECK(at::equal(bridge->weight, saved));
  }

  TEST_CASE("what the optimizer does not step is no whole") {
    const support::TemporaryFolder folder;
    set_devices("virtual:1");
    SavedGroup whole;
    const auto refused = [&](const ModelGroup& group) {
      CHECK_THROWS_AS(save_checkpoint(folder.path(), group, whole.optimizer), std::invalid_argument);
      CHECK_THROWS_AS(load_checkpoint(folder.path(), group, whole.optimizer), std::invalid_argument);
      CHECK_THROWS_AS(load_weights(folder.path(), group), std::invalid_argument);
    };
    refused({});
    refused({{{"encoder", &whole.first}}});
    refused({{{"encoder", &whole.first}, {"decoder", &whole.second}}});
    CHECK_THROWS_AS(save_checkpoint(folder.path(), whole.first, whole.optimizer), std::invalid_argument);
    CHECK_THROWS_AS(load_weights(folder.path(), whole.first), std::invalid_argument);
  }
}
