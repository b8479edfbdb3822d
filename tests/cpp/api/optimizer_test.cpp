#include <roundpipe/roundpipe.h>

#include <cmath>
#include <limits>

#include <ATen/Version.h>
#include <doctest/doctest.h>

#include "support/plain_loop.h"

using namespace roundpipe;
using namespace roundpipe::support;
namespace nn = torch::nn;

namespace {

constexpr int64_t kPoints = 8;

nn::Sequential mlp() {
  return nn::Sequential(nn::Linear(5, 9), nn::Functional(torch::tanh), nn::Linear(9, 7), nn::Linear(7, 3));
}

Tensor squared_errors(const Tensor& outputs, const Tensor& label) {
  return (outputs - label).to(at::kFloat).square().sum();
}

// A model and a plain copy of it, with the same batches.
struct Race {
  explicit Race(at::ScalarType dtype = at::kFloat) : layers(mlp()) {
    layers->to(dtype);
    plain = twin_of(layers);
    model = std::make_unique<Model>(layers);
    model->run_options().microbatches = 3;
  }
  void call() {
    const Tensor batch = at::randn({kPoints, 5}), labels = at::randn({kPoints, 3});
    const auto dtype = layers->parameters()[0].scalar_type();
    const PlainStep reference{bodies(plain), squared_errors, plain->parameters()};
    const auto number = model->calls();
    const Tensor loss = model->forward_backward(batch.to(dtype), labels.to(dtype), squared_errors).loss;
    const Tensor expected = reference.run(*model, number, batch.to(dtype), labels.to(dtype), 3);
    CHECK((exact ? same_bits(loss, expected) : at::allclose(loss, expected, 1e-4)));
  }
  bool same() {
    model->synchronize();
    return same_state(layers->parameters(), plain->parameters());
  }
  nn::Sequential layers, plain{nullptr};
  std::unique_ptr<Model> model;
  bool exact = true;
};

void clear(const nn::Sequential& layers) {
  for (Tensor& parameter : layers->parameters()) parameter.mutable_grad() = Tensor();
}

}  // namespace

TEST_SUITE("optimizer") {
  TEST_CASE("fused steps are libtorch's: SGD bit for bit, AdamW but for the last bits of its roots") {
    // torch's kernels for any processor round twice where the others, as ours, fuse a product and a sum.
    const bool fuses = at::get_cpu_capability() != "DEFAULT";
    for (const int devices : {1, 3}) {
      for (const bool sgd : {false, true}) {
        CAPTURE(sgd);
        set_devices(concat("virtual:", devices, ",debug"));
        at::manual_seed(1);
        Race race;
        race.exact = sgd && fuses;
        const auto adamw = torch::optim::AdamWOptions(0.03).weight_decay(0.2);
        const auto momentum = torch::optim::SGDOptions(0.05).momentum(0.9);
        Optimizer ours(*race.model, sgd ? UpdateRule(momentum) : UpdateRule(adamw));
        std::unique_ptr<torch::optim::Optimizer> theirs;
        if (sgd)
          theirs = std::make_unique<torch::optim::SGD>(race.plain->parameters(), momentum);
        else
          theirs = std::make_unique<torch::optim::AdamW>(race.plain->parameters(), adamw);
        for (int step = 0; step < 4; ++step) {
          race.call();
          if (step == 2) race.call();  // gradients of two calls
          race.model->step(ours, {.asynchronous = false}).wait();
          theirs->step();
          clear(race.plain);
        }
        CHECK(ours.steps() == 4);
        race.model->synchronize();
        for (size_t i = 0; i < race.layers->parameters().size(); ++i) {
          CHECK(at::allclose(race.layers->parameters()[i], race.plain->parameters()[i], 1e-5, 1e-6));
        }
        if (race.exact) CHECK(race.same());
      }
    }
  }

  TEST_CASE("an asynchronous step is read by the call after the next") {
    set_devices("virtual:2,debug");
    at::manual_seed(2);
    nn::Sequential layers = mlp();
    Model model(layers);
    Optimizer optimizer(model, torch::optim::SGDOptions(0.1));
    const Tensor batch = at::randn({kPoints, 5}), labels = at::randn({kPoints, 3});
    std::vector<double> losses;
    for (int i = 0; i < 3; ++i) {
      losses.push_back(model.forward_backward(batch, labels, squared_errors).loss.item<double>());
      model.step(optimizer);
    }
    CHECK(losses[1] == losses[0]);
    CHECK(losses[2] < losses[1]);
  }

  TEST_CASE("model.step clips and steps an optimizer of libtorch") {
    set_devices("virtual:2,debug");
    at::manual_seed(3);
    Race race;
    torch::optim::SGD ours(race.layers->parameters(), 0.1), theirs(race.plain->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      race.call();
      const Step made = race.model->step(ours, {.max_grad_norm = 0.5});
      const double norm = nn::utils::clip_grad_norm_(race.plain->parameters(), 0.5);
      theirs.step();
      clear(race.plain);
      CHECK(made.grad_norm() == norm);
      CHECK_FALSE(made.skipped());
    }
    CHECK(race.same());
  }

  TEST_CASE("bf16 weights have fp32 masters") {
    set_devices("virtual:2,debug");
    at::manual_seed(4);
    Race race(at::kBFloat16);
    std::vector<Tensor> masters;
    for (const Tensor& parameter : race.plain->parameters())
      masters.push_back(parameter.detach().to(at::kFloat).set_requires_grad(true));
    // A rate with which no master lies half-way between two bf16 numbers, which ours round away from zero.
    constexpr double kRate = 0.0173;
    Optimizer ours(*race.model, torch::optim::SGDOptions(kRate));
    torch::optim::SGD theirs(masters, kRate);
    for (int step = 0; step < 4; ++step) {
      race.call();
      race.model->step(ours, {.asynchronous = false});
      const at::NoGradGuard no_grad;
      for (size_t i = 0; i < masters.size(); ++i) {
        masters[i].mutable_grad() = race.plain->parameters()[i].grad().to(at::kFloat);
      }
      theirs.step();
      for (size_t i = 0; i < masters.size(); ++i) race.plain->parameters()[i].copy_(masters[i]);
      clear(race.plain);
    }
    CHECK(race.same());
  }

  TEST_CASE("groups have their own options; schedules are functions of the step") {
    set_devices("virtual:2");
    at::manual_seed(5);
    nn::Sequential layers = mlp();
    Model model(layers);
    const std::vector<Tensor> before = [&] {
      std::vector<Tensor> copies;
      for (const Tensor& parameter : layers->parameters()) copies.push_back(parameter.detach().clone());
      return copies;
    }();
    UpdateRule frozen{torch::optim::SGDOptions(0)};
    const auto is_bias = [](const std::string& name, const Tensor&) { return name.ends_with("bias"); };
    Optimizer optimizer(model, torch::optim::SGDOptions(0.1), {{is_bias, frozen.options}});
    REQUIRE(optimizer.groups() == 2);
    optimizer.set_learning_rate(linear_rate(2, 4));
    CHECK(optimizer.options().lr == 0.05);
    const Tensor batch = at::randn({kPoints, 5}), labels = at::randn({kPoints, 3});
    std::vector<double> rates;
    for (int i = 0; i < 4; ++i) {
      rates.push_back(optimizer.options().lr);
      model.forward_backward(batch, labels, squared_errors);
      model.step(optimizer);
    }
    CHECK(rates == std::vector<double>{0.05, 0.1, 0.1, 0.05});
    CHECK(optimizer.options().lr == 0);
    model.synchronize();
    const std::vector<Tensor> after = layers->parameters();
    for (size_t i = 0; i < after.size(); ++i) CHECK(same_bits(before[i], after[i]) == (i % 2 == 1));
    CHECK(optimizer.host_bytes().parameters > 0);
  }

  TEST_CASE("what does not fit is refused, and changes nothing") {
    set_devices("virtual:1");
    at::manual_seed(6);
    nn::Sequential layers = mlp();
    Model model(layers), other(mlp(), {.name = "other"});
    const auto none = [](const std::string&, const Tensor&) { return false; };
    CHECK_THROWS_WITH_AS(Optimizer(model, optim::Algorithm::kLion, {{none, {}}}), doctest::Contains("group 0"),
                         std::invalid_argument);
    Optimizer optimizer(model, optim::Algorithm::kLion), of_other(other, optim::Algorithm::kAdam);
    CHECK_THROWS_AS(model.step(of_other), std::invalid_argument);
    CHECK_THROWS_AS(model.step(optimizer, {.max_grad_norm = 0.0}), std::invalid_argument);
    torch::optim::SGD plain(layers->parameters(), 0.1);
    CHECK_THROWS_WITH_AS(model.step(plain), doctest::Contains("model.step(optimizer)"), std::invalid_argument);
    for (Tensor& parameter : layers->parameters()) parameter.set_requires_grad(false);
    CHECK_THROWS_AS(Optimizer(model, optim::Algorithm::kSGD), std::invalid_argument);
    layers->parameters()[0].set_requires_grad(true);
    model.forward(at::randn({2, 5}));
    Optimizer second(model, optim::Algorithm::kSGD);
    CHECK_THROWS_AS(model.step(optimizer), std::invalid_argument);
    layers->parameters()[1].set_requires_grad(true);
    CHECK_THROWS_WITH_AS(model.forward(at::randn({2, 5})), doctest::Contains("0.bias"), std::invalid_argument);
  }
}

TEST_SUITE("grad scaler") {
  TEST_CASE("a step with inf changes nothing, and the scale backs off") {
    for (const bool fused : {false, true}) {
      for (const bool asynchronous : {false, true}) {
        set_devices("virtual:2");
        at::manual_seed(7);
        nn::Sequential layers = mlp();
        Model model(layers);
        std::unique_ptr<Optimizer> ours;
        if (fused) ours = std::make_unique<Optimizer>(model, torch::optim::SGDOptions(0.01));
        torch::optim::SGD theirs(layers->parameters(), 0.01);
        GradScaler scaler({.init_scale = 1024, .growth_interval = 2});
        const auto step = [&](bool overflows) {
          const Tensor batch = at::randn({kPoints, 5}), labels = at::randn({kPoints, 3});
          model.forward_backward(batch, labels, [&](const Tensor& outputs, const Tensor& label) {
            return scaler.scale(squared_errors(outputs, label)) *
                   (overflows ? std::numeric_limits<float>::infinity() : 1.0F);
          });
          return fused ? model.step(*ours, {.asynchronous = asynchronous, .max_grad_norm = 1.0, .scaler = &scaler})
                       : model.step(theirs, {.scaler = &scaler});
        };
        CHECK_FALSE(step(false).skipped());
        model.synchronize();
        const Tensor before = layers->parameters()[0].detach().clone();
        CHECK(step(true).skipped());
        model.synchronize();
        CHECK(same_bits(before, layers->parameters()[0]));
        CHECK(scaler.get_scale() == 512);
        step(false);
        step(false);
        model.synchronize();
        CHECK(scaler.get_scale() == 1024);
        const GradScaler::State state = scaler.state();
        GradScaler other;
        other.load(state);
        CHECK(other.get_scale() == 1024);
      }
    }
  }

  TEST_CASE("scaled steps have the bits of unscaled ones") {
    set_devices("virtual:2");
    at::manual_seed(8);
    nn::Sequential layers = mlp(), plain = twin_of(layers);
    Model model(layers), reference(plain, {.name = "reference"});
    Optimizer ours(model, torch::optim::SGDOptions(0.01)), theirs(reference, torch::optim::SGDOptions(0.01));
    GradScaler scaler({.init_scale = 4096});
    for (int i = 0; i < 3; ++i) {
      const Tensor batch = at::randn({kPoints, 5}), labels = at::randn({kPoints, 3});
      model.forward_backward(batch, labels,
                             [&](const Tensor& x, const Tensor& y) { return scaler.scale(squared_errors(x, y)); });
      reference.forward_backward(batch, labels, squared_errors);
      model.step(ours, {.scaler = &scaler});
      reference.step(theirs);
    }
    model.synchronize();
    reference.synchronize();
    CHECK(same_state(layers->parameters(), plain->parameters()));
  }

  TEST_CASE("NaN is an error without a scaler only") {
    set_devices("virtual:1");
    nn::Sequential layers = mlp();
    Model model(layers);
    const auto bad = [](const Tensor& outputs) { return outputs.sum() * std::nan(""); };
    const Tensor batch = at::randn({kPoints, 5});
    CHECK_THROWS_WITH_AS(model.forward_backward(batch, std::tuple<>(), bad), doctest::Contains("NaN"), Error);
    auto pending = model.submit(batch, std::tuple<>(), bad);
    CHECK_THROWS_AS(pending.finish(), Error);
    model.synchronize();
    CHECK_FALSE(layers->parameters()[0].grad().defined());
    GradScaler scaler;
    CHECK_NOTHROW(model.forward_backward(batch, std::tuple<>(), bad));
    CHECK_THROWS_AS(GradScaler({.growth_factor = 1}), std::invalid_argument);
    CHECK_THROWS_AS(GradScaler({.backoff_factor = 1}), std::invalid_argument);
    CHECK_THROWS_AS(GradScaler({.init_scale = 0}), std::invalid_argument);
  }
}

TEST_SUITE("learning rate") {
  TEST_CASE("warmup, then down") {
    CHECK(warmup_rate(4)(0) == 0.25);
    CHECK(warmup_rate(4)(4) == 1);
    CHECK(constant_rate()(100) == 1);
    CHECK(cosine_rate(2, 10, 0.1)(0) == 0.5);
    CHECK(cosine_rate(2, 10, 0.1)(2) == 1);
    CHECK(cosine_rate(2, 10, 0.1)(6) == doctest::Approx(0.55));
    CHECK(cosine_rate(2, 10, 0.1)(10) == doctest::Approx(0.1));
    CHECK(linear_rate(0, 0)(0) == 0);
    CHECK_THROWS_AS(linear_rate(5, 4), std::invalid_argument);
    CHECK_THROWS_AS(cosine_rate(0, 4, 2), std::invalid_argument);
  }
}
