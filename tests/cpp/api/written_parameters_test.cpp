// Layers whose forward changes their parameters: refused by name, whatever their class.

#include <roundpipe/roundpipe.h>

#include <atomic>
#include <functional>
#include <memory>

#include <doctest/doctest.h>
#include <torch/nn.h>

#include "support/chain.h"

using namespace roundpipe;
using namespace roundpipe::support;
namespace nn = torch::nn;

namespace {

Tensor mean_square(const Tensor& outputs, const Tensor&) { return (outputs - 1).square().mean(); }

// Scales its input, and does something to its parameter.
struct WriterImpl : nn::Module {
  explicit WriterImpl(std::function<void(Tensor&)> writes) : write(std::move(writes)) {
    scale = register_parameter("scale", torch::tensor({3.0F, 4.0F}));
  }
  Tensor forward(const Tensor& x) {
    write(scale);
    return x * scale;
  }
  const std::function<void(Tensor&)> write;
  Tensor scale;
};
TORCH_MODULE(Writer);

Layer writer(const std::function<void(Tensor&)>& write) {
  return layer(Writer(write)).made_by([write] { return std::make_shared<WriterImpl>(write); });
}

void write_data(const Tensor& parameter) { parameter.detach().mutable_data_ptr<float>()[0] = 9; }

}  // namespace

TEST_SUITE("written parameters") {
  TEST_CASE("embeddings with a largest norm are refused by the call that would scale a row") {
    set_devices("virtual:2");
    const Tensor ids = torch::tensor({{0L, 1L}, {2L, 3L}});
    const auto embedding = nn::Embedding(nn::EmbeddingOptions(5, 4).max_norm(0.5));
    const Tensor before = embedding->weight.detach().clone();
    Model model(std::vector<Layer>{layer(embedding), layer(nn::Linear(4, 1))});
    const char* const says = "[forward] layer 0 (0) changes its parameter 'weight' in its forward";
    for (int round = 0; round < 2; ++round) {
      CHECK_THROWS_WITH_AS(model.forward_backward(ids, Tensor(), mean_square), doctest::Contains(says),
                           std::invalid_argument);
      CHECK_THROWS_WITH_AS(model.forward(ids), doctest::Contains(says), std::invalid_argument);
      CHECK_THROWS_WITH_AS(model.predict_memory(ids, Tensor(), mean_square), doctest::Contains(says),
                           std::invalid_argument);
    }
    CHECK(torch::equal(embedding->weight, before));

    const auto bag = nn::EmbeddingBag(nn::EmbeddingBagOptions(5, 4).max_norm(0.5));
    Model bags(nn::Sequential{bag});
    CHECK_THROWS_WITH_AS(bags.forward(ids), doctest::Contains(says), std::invalid_argument);
  }

  TEST_CASE("a largest norm that no row reaches changes nothing, until one does") {
    set_devices("virtual:1");
    nn::Embedding embedding(nn::EmbeddingOptions(5, 4).max_norm(100));
    Model model(std::vector<Layer>{layer(embedding)});
    const Tensor ids = torch::tensor({{0L, 1L}, {2L, 3L}});
    for (int step = 0; step < 5; ++step) {
      const auto found = model.forward_backward(ids, Tensor(), mean_square);
      model.synchronize();
      const Tensor plain = embedding(ids);
      CHECK(found.loss.item<double>() > 0);
      CHECK(torch::equal(model.forward(ids), plain));
    }
    const torch::NoGradGuard no_grad;
    embedding->weight[3].fill_(1000);
    CHECK_NOTHROW(model.forward(torch::tensor({{0L, 1L}, {2L, 2L}})));
    CHECK_THROWS_AS(model.forward(ids), std::invalid_argument);
  }

  TEST_CASE("writes that raise no version are found, in the first call or in a later one") {
    set_devices("virtual:1");
    for (const int later : {0, 3}) {
      CAPTURE(later);
      auto calls = std::make_shared<std::atomic<int>>(0);
      Model model(std::vector<Layer>{writer([calls, later](Tensor& scale) {
        if ((*calls)++ >= later) write_data(scale);
      })});
      const auto call = [&] { model.forward(torch::ones({1, 2})); };
      for (int i = 0; i < later; ++i) CHECK_NOTHROW(call());
      CHECK_THROWS_WITH_AS(
          [&] {
            for (int i = 0; i < 8; ++i) call();
          }(),
          doctest::Contains("changes its parameter 'scale'"), std::invalid_argument);
    }
  }

  TEST_CASE("new values behind the parameter are found, equal ones are not") {
    set_devices("virtual:1");
    const auto forward = [](const std::function<void(Tensor&)>& write) {
      Model model(std::vector<Layer>{writer(write)});
      for (int i = 0; i < 5; ++i) {
        const Tensor found = model.forward(torch::ones({3, 2}));
        CHECK(torch::equal(found, torch::tensor({3.0F, 4.0F}).expand({3, 2})));
      }
    };
    CHECK_THROWS_AS(forward([](Tensor& scale) { scale.set_data(scale * 2); }), std::invalid_argument);
    forward([](Tensor& scale) { scale.set_data(scale.clone()); });
    forward([](Tensor& scale) {
      const torch::NoGradGuard no_grad;
      scale.mul_(1);
    });
    forward([](Tensor&) {});
  }
}
