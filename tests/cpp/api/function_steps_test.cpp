#include <roundpipe/roundpipe.h>

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <thread>

#include <doctest/doctest.h>

#include "support/plain_loop.h"

using namespace roundpipe;
using namespace roundpipe::support;
namespace nn = torch::nn;

namespace {

nn::Sequential three_layers() {
  return nn::Sequential(nn::Linear(5, 9), nn::Functional(torch::tanh), nn::Linear(9, 7), nn::Linear(7, 3));
}

Tensor square_error(const Tensor& outputs, const Tensor& label) {
  return (outputs - label).to(at::kFloat).square().sum();
}

std::vector<Tensor> tensors_of(const NamedParameters& named) {
  std::vector<Tensor> tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

// A model that functions step, and a plain copy of it.
struct Pair {
  explicit Pair(at::ScalarType dtype = at::kFloat) : layers(three_layers()) {
    layers->to(dtype);
    plain = twin_of(layers);
    model = std::make_unique<Model>(layers);
    model->run_options().microbatches = 2;
  }
  void call() {
    const auto dtype = layers->parameters()[0].scalar_type();
    const Tensor batch = at::randn({6, 5}).to(dtype), labels = at::randn({6, 3}).to(dtype);
    const auto number = model->calls();
    const Tensor loss = model->forward_backward(batch, labels, square_error).loss;
    const PlainStep reference{bodies(plain), square_error, plain->parameters()};
    CHECK(same_bits(loss, reference.run(*model, number, batch, labels, 2)));
  }
  bool same() {
    model->synchronize();
    return same_state(layers->parameters(), plain->parameters());
  }
  nn::Sequential layers, plain{nullptr};
  std::unique_ptr<Model> model;
};

const auto kOptions = torch::optim::SGDOptions(0.05).momentum(0.9);

}  // namespace

TEST_SUITE("steps by a function") {
  TEST_CASE("any optimizer has the bits of a plain loop, on any devices") {
    for (const int devices : {1, 3}) {
      set_devices(concat("virtual:", devices, ",debug"));
      at::manual_seed(1);
      Pair pair;
      torch::optim::SGD ours(tensors_of(pair.model->optimizer_parameters()), kOptions);
      torch::optim::SGD theirs(pair.plain->parameters(), kOptions);
      for (int step = 0; step < 4; ++step) {
        pair.call();
        if (step == 2) pair.call();  // gradients of two calls
        pair.model->step(
            [&] {
              ours.step();
              ours.zero_grad();
            },
            /*asynchronous=*/false);
        theirs.step();
        theirs.zero_grad();
        CHECK(pair.same());
      }
    }
  }

  TEST_CASE("an asynchronous one is read one call late, whatever the timing") {
    set_devices("virtual:2,debug");
    at::manual_seed(2);
    Pair pair;
    torch::optim::SGD ours(tensors_of(pair.model->optimizer_parameters()), kOptions);
    std::vector<Tensor> copies;
    for (const Tensor& parameter : pair.plain->parameters())
      copies.push_back(parameter.detach().clone().set_requires_grad(true));
    torch::optim::SGD theirs(copies, kOptions);
    for (int step = 0; step < 5; ++step) {
      pair.call();
      pair.model->step([&] {
        ours.step();
        ours.zero_grad();
      });
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < copies.size(); ++i) {
        Tensor read = pair.plain->parameters()[i];
        read.copy_(copies[i]);
        copies[i].mutable_grad() = read.grad().clone();
        read.mutable_grad().reset();
      }
      theirs.step();
    }
    pair.model->synchronize();
    CHECK(same_state(pair.layers->parameters(), copies));
  }

  TEST_CASE("the optimizer's parameters may be wider than the weights") {
    set_devices("virtual:1");
    at::manual_seed(3);
    Pair pair(at::kBFloat16);
    const NamedParameters& wide = pair.model->optimizer_parameters(at::kFloat);
    torch::optim::SGD ours(tensors_of(wide), torch::optim::SGDOptions(1e-3));
    for (int step = 0; step < 3; ++step) {
      pair.model->forward_backward(at::randn({6, 5}).to(at::kBFloat16), at::randn({6, 3}).to(at::kBFloat16),
                                   square_error);
      pair.model->step([&] { ours.step(), ours.zero_grad(); }, false);
    }
    pair.model->synchronize();
    for (size_t i = 0; i < wide.size(); ++i) {
      CHECK((wide[i].second.scalar_type() == at::kFloat));
      CHECK(same_bits(pair.layers->parameters()[i], wide[i].second.to(at::kBFloat16)));
    }
    CHECK_THROWS_WITH_AS(pair.model->optimizer_parameters(at::kDouble), doctest::Contains("asked for now"),
                         std::invalid_argument);
  }

  TEST_CASE("what the program writes goes both ways") {
    set_devices("virtual:1");
    at::manual_seed(4);
    Pair pair;
    const NamedParameters& own = pair.model->optimizer_parameters();
    const at::NoGradGuard no_grad;
    own[0].second.fill_(0.25);  // into the copies: the next call reads it
    const Tensor with_copy = pair.model->forward(at::ones({2, 5}));
    CHECK(same_bits(pair.layers->parameters()[0], own[0].second));
    pair.model->synchronize();
    pair.layers->parameters()[0].fill_(0.5);  // into the model's: the copies have it after synchronize()
    pair.model->synchronize();
    CHECK(at::equal(own[0].second, pair.layers->parameters()[0]));
    CHECK_FALSE(at::equal(with_copy, pair.model->forward(at::ones({2, 5}))));
  }

  TEST_CASE("an error of the function is thrown by who waits for it, and training goes on") {
    set_devices("virtual:2,debug");
    at::manual_seed(5);
    Pair pair;
    torch::optim::SGD ours(tensors_of(pair.model->optimizer_parameters()), kOptions);
    torch::optim::SGD theirs(pair.plain->parameters(), kOptions);
    for (const bool asynchronous : {false, true}) {
      pair.call();
      const auto failing = [&] { pair.model->step([] { throw std::runtime_error("no"); }, asynchronous); };
      if (asynchronous) {
        failing();
        CHECK_THROWS_WITH_AS(pair.model->synchronize(), "no", std::runtime_error);
      } else {
        CHECK_THROWS_WITH_AS(failing(), "no", std::runtime_error);
      }
      theirs.zero_grad();  // the gradients of the step are gone
    }
    CHECK_THROWS_WITH_AS(pair.model->step([&] { pair.model->synchronize(); }, false),
                         doctest::Contains("would wait for itself"), Error);
    pair.call();
    pair.model->step([&] { ours.step(), ours.zero_grad(); }, false);
    theirs.step();
    CHECK(pair.same());
  }

  TEST_CASE("a model is stepped in one way only, and what is frozen stays so") {
    set_devices("virtual:1");
    {
      Pair pair;
      Optimizer fused(*pair.model, torch::optim::SGDOptions(0.1));
      CHECK_THROWS_WITH_AS(pair.model->optimizer_parameters(), doctest::Contains("in one way only"),
                           std::invalid_argument);
      CHECK_THROWS_WITH_AS(pair.model->step([] {}), doctest::Contains("in one way only"), std::invalid_argument);
    }
    Pair pair;
    pair.layers->parameters()[0].set_requires_grad(false);
    // A dtype that trains nothing leaves everything as it was.
    CHECK_THROWS(pair.model->optimizer_parameters(at::kInt));
    CHECK_THROWS_WITH_AS(pair.model->step(std::function<void()>()), doctest::Contains("the function is empty"),
                         std::invalid_argument);
    CHECK(pair.model->optimizer_parameters().size() == pair.layers->parameters().size() - 1);
    CHECK(pair.model->optimizer_parameters()[0].first == "0.bias");
    CHECK_THROWS_WITH_AS(Optimizer(*pair.model, torch::optim::SGDOptions(0.1)), doctest::Contains("in one way only"),
                         std::invalid_argument);
    torch::optim::SGD plain(pair.layers->parameters(), kOptions);
    CHECK_THROWS_WITH_AS(pair.model->step(plain), doctest::Contains("expected steps by a function"),
                         std::invalid_argument);
    pair.layers->parameters()[0].set_requires_grad(true);
    CHECK_THROWS_WITH_AS(pair.model->forward(at::ones({2, 5})), doctest::Contains("requires grad now"),
                         std::invalid_argument);
  }

  TEST_CASE("a model that goes leaves the newest weights, and gradients are dropped on request") {
    set_devices("virtual:2,debug");
    at::manual_seed(6);
    Pair pair;
    std::vector<Tensor> own = tensors_of(pair.model->optimizer_parameters());
    pair.call();
    pair.model->zero_grad();
    pair.call();
    std::thread::id where;
    pair.model->step([&] {
      where = std::this_thread::get_id();
      const at::NoGradGuard no_grad;
      for (Tensor& parameter : own) parameter.add_(parameter.grad());
    });
    pair.model.reset();
    CHECK(where != std::this_thread::get_id());
    CHECK(same_state(pair.layers->parameters(), own));
  }

  TEST_CASE("gradients are clipped before the function, and unscaled: with the bits of a plain loop") {
    set_devices("virtual:2,debug");
    at::manual_seed(6);
    Pair pair;
    torch::optim::SGD ours(tensors_of(pair.model->optimizer_parameters()), kOptions);
    torch::optim::SGD theirs(pair.plain->parameters(), kOptions);
    GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
    std::vector<double> scales;
    bool clips = false;
    for (const double factor : {1.0, 1.0, std::numeric_limits<double>::infinity(), 1.0}) {
      const Tensor batch = at::randn({6, 5}), labels = at::randn({6, 3});
      scales.push_back(scaler.get_scale());
      const auto number = pair.model->calls();
      pair.model->forward_backward(
          batch, labels, [&](const Tensor& x, const Tensor& y) { return scaler.scale(square_error(x, y)) * factor; });
      pair.model->step(
          [&] {
            ours.step();
            ours.zero_grad();
          },
          {.asynchronous = false, .max_grad_norm = clips ? std::optional(0.5) : std::nullopt, .scaler = &scaler});
      if (std::isfinite(factor)) {
        PlainStep{bodies(pair.plain), square_error, pair.plain->parameters()}.run(*pair.model, number, batch, labels,
                                                                                  2);
        if (clips) nn::utils::clip_grad_norm_(pair.plain->parameters(), 0.5);
        theirs.step();
        theirs.zero_grad();
      }
      CHECK(pair.same());
      clips = !clips;
    }
    CHECK(scales == std::vector<double>{1024, 1024, 2048, 1024});
    CHECK_THROWS_AS(pair.model->step([] {}, {.max_grad_norm = 0.0}), std::invalid_argument);
    GradScaler unused;
    CHECK_THROWS_WITH_AS(pair.model->step([] {}, {.scaler = &unused}), doctest::Contains("no loss yet"),
                         std::invalid_argument);
  }

  TEST_CASE("a scale reaches the losses one asynchronous step later, and what raises does not move it") {
    set_devices("virtual:2");
    at::manual_seed(7);
    Pair a, b;
    const auto own = tensors_of(a.model->optimizer_parameters());
    GradScaler scaler({.init_scale = 8, .growth_interval = 1});
    std::vector<double> scales;
    const auto call = [&](Pair& pair) {
      scales.push_back(scaler.get_scale());
      pair.model->forward_backward(at::randn({6, 5}), at::randn({6, 3}),
                                   [&](const Tensor& x, const Tensor& y) { return scaler.scale(square_error(x, y)); });
    };
    const StepOptions options{.scaler = &scaler};
    const auto nothing = [&] {
      for (const Tensor& each : own) each.mutable_grad() = Tensor();
    };
    for (int step = 0; step < 4; ++step) {
      call(a);
      a.model->step(nothing, options);
    }
    CHECK(scales == std::vector<double>{8, 8, 16, 32});
    // The steps of another model wait for the decision, too.
    scales.clear();
    call(b);
    b.model->step([] {}, options);
    call(b);
    CHECK(scales == std::vector<double>{64, 128});
    b.model->synchronize();
    b.model->step([] {}, options);
    a.model->synchronize();

    const double before = scaler.state().scale;
    call(a);
    a.model->step([] { throw std::runtime_error("mine"); }, options);
    CHECK_THROWS_WITH(a.model->synchronize(), "mine");
    CHECK(scaler.state().scale == before);
  }
}
