#include <roundpipe/roundpipe.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <thread>

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
    REQUIRE(optimizer.param_groups().size() == 2);
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
  }

  TEST_CASE("steps of the rate are those of torch's StepLR, one step before libtorch's") {
    set_devices("virtual:1");
    nn::Sequential layers = mlp(), others = mlp();
    Model model(layers);
    Optimizer optimizer(model, torch::optim::SGDOptions(0.5));
    optimizer.set_learning_rate(step_rate(3, 0.25));
    torch::optim::SGD plain(others->parameters(), torch::optim::SGDOptions(0.5));
    torch::optim::StepLR schedule(plain, 3, 0.25);
    schedule.step();  // what Python's does when it is made
    for (int i = 0; i < 8; ++i) {
      CHECK(optimizer.options().lr == plain.param_groups()[0].options().get_lr());
      model.forward_backward(at::ones({kPoints, 5}), at::ones({kPoints, 3}), squared_errors);
      model.step(optimizer);
      schedule.step();
    }
    CHECK_THROWS_WITH_AS(step_rate(0), doctest::Contains("1 step or more"), std::invalid_argument);
    CHECK_THROWS_WITH_AS(step_rate(1, -1), doctest::Contains("not negative"), std::invalid_argument);
    CHECK_THROWS_AS(step_rate(1, std::nan("")), std::invalid_argument);
  }

  TEST_CASE("gradients that are dropped are in no step, and rates change by group") {
    set_devices("virtual:2");
    at::manual_seed(6);
    nn::Sequential layers = mlp(), same = twin_of(layers);
    Model model(layers), twin(same);
    const auto is_bias = [](const std::string& name, const Tensor&) { return name.ends_with("bias"); };
    Optimizer optimizer(model, torch::optim::SGDOptions(0.1), {{is_bias, {.weight_decay = 0.1}}});
    Optimizer expected(twin, torch::optim::SGDOptions(0.05), {{is_bias, {.weight_decay = 0.1}}});
    for (optim::Hyperparameters& group : optimizer.param_groups()) group.lr *= 0.5;
    const Tensor batch = at::randn({kPoints, 5}), labels = at::randn({kPoints, 3});
    model.forward_backward(batch * 2, labels, squared_errors);
    twin.set_calls(model.calls());
    optimizer.zero_grad();
    for (int i = 0; i < 2; ++i) {
      model.forward_backward(batch, labels, squared_errors);
      twin.forward_backward(batch, labels, squared_errors);
      model.step(optimizer);
      twin.step(expected);
    }
    model.synchronize();
    twin.synchronize();
    CHECK(same_state(layers->parameters(), same->parameters()));
  }

  TEST_CASE("a group keeps the rule's other options, as groups of torch do") {
    set_devices("virtual:1");
    nn::Sequential layers = mlp();
    Model model(layers);
    const auto is_bias = [](const std::string&, const Tensor& parameter) { return parameter.dim() < 2; };
    const auto rule = torch::optim::SGDOptions(0.05).momentum(0.9).weight_decay(0.1);
    Optimizer optimizer(model, rule, {{.holds = is_bias, .options = {.weight_decay = 0}}});
    CHECK(optimizer.options(0).lr == 0.05);
    CHECK(optimizer.options(0).momentum == 0.9);
    CHECK(optimizer.options(0).weight_decay == 0);
    CHECK(optimizer.options(1).weight_decay == 0.1);
    Optimizer adamw(model, torch::optim::AdamWOptions(3e-4), {{is_bias, {.lr = 1, .amsgrad = true}}});
    CHECK(adamw.options(0).lr == 1);
    CHECK(adamw.options(0).amsgrad);
    CHECK(adamw.options(0).weight_decay == 1e-2);
    CHECK(adamw.options(1).lr == 3e-4);
    CHECK_FALSE(adamw.options(1).amsgrad);
  }

  TEST_CASE("limits of the norm are refused before the step, for our optimizers and libtorch's") {
    set_devices("virtual:1");
    at::manual_seed(11);
    for (const bool fused : {false, true}) {
      nn::Sequential layers = mlp();
      Model model(layers);
      std::optional<Optimizer> ours;
      if (fused) ours.emplace(model, torch::optim::SGDOptions(0.1));
      torch::optim::SGD theirs(layers->parameters(), 0.1);
      const auto step = [&](const StepOptions& options) {
        return fused ? model.step(*ours, options) : model.step(theirs, options);
      };
      model.forward_backward(at::randn({kPoints, 5}), at::randn({kPoints, 3}), squared_errors);
      model.synchronize();
      const Tensor before = layers->parameters()[0].detach().clone();
      for (const double norm : {-1.0, 0.0, std::nan(""), -std::numeric_limits<double>::infinity()})
        CHECK_THROWS_WITH_AS(step({.max_grad_norm = norm}), doctest::Contains("max_grad_norm"), std::invalid_argument);
      CHECK_THROWS_WITH_AS(step({.gradient_factor = 0.5}), doctest::Contains("one process"), std::invalid_argument);
      CHECK_THROWS_AS(step({.gradient_factor = std::nan("")}), std::invalid_argument);
      model.synchronize();
      CHECK(same_bits(before, layers->parameters()[0]));
      CHECK(step({.max_grad_norm = std::numeric_limits<double>::infinity(), .gradient_factor = 1}).grad_norm() > 0);
      model.synchronize();
      CHECK_FALSE(same_bits(before, layers->parameters()[0]));
    }
  }

  TEST_CASE("a schedule that throws, or returns no rate, does so before the step is made") {
    set_devices("virtual:1");
    at::manual_seed(12);
    nn::Sequential layers = mlp();
    Model model(layers);
    Optimizer optimizer(model, torch::optim::SGDOptions(0.1));
    bool fails = false;
    const auto rate = [&](int64_t step) {
      if (fails && step == 1) throw std::logic_error("rate");
      return step == 2 ? std::nan("") : 1.0;
    };
    optimizer.set_learning_rate(rate);
    const auto call = [&] { model.forward_backward(at::ones({kPoints, 5}), at::ones({kPoints, 3}), squared_errors); };
    call();
    model.synchronize();
    const Tensor before = layers->parameters()[0].detach().clone();
    fails = true;
    CHECK_THROWS_WITH_AS(model.step(optimizer), "rate", std::logic_error);
    CHECK_THROWS_AS(optimizer.set_steps(1), std::logic_error);
    model.synchronize();
    CHECK(optimizer.steps() == 0);
    CHECK(same_bits(before, layers->parameters()[0]));
    fails = false;
    model.step(optimizer);  // with the gradients that are there still
    model.synchronize();
    CHECK(optimizer.steps() == 1);
    CHECK_FALSE(same_bits(before, layers->parameters()[0]));
    call();
    CHECK_THROWS_WITH_AS(model.step(optimizer), doctest::Contains("schedule"), std::invalid_argument);
    CHECK(optimizer.steps() == 1);
    CHECK(optimizer.options().lr == 0.1);
  }

  TEST_CASE("what does not fit is refused, and changes nothing") {
    set_devices("virtual:1");
    at::manual_seed(6);
    nn::Sequential layers = mlp();
    Model model(layers);
    const auto none = [](const std::string&, const Tensor&) { return false; };
    CHECK_THROWS_WITH_AS(Optimizer(model, optim::Algorithm::kLion, {{none, {}}}), doctest::Contains("group 0"),
                         std::invalid_argument);
    CHECK_THROWS_WITH_AS(Optimizer(model, torch::optim::SGDOptions(0.1).nesterov(true)), doctest::Contains("nesterov"),
                         std::invalid_argument);
    for (Tensor& parameter : layers->parameters()) parameter.set_requires_grad(false);
    CHECK_THROWS_AS(Optimizer(model, optim::Algorithm::kSGD), std::invalid_argument);
    layers->parameters()[0].set_requires_grad(true);
    model.forward(at::randn({2, 5}));
    Optimizer second(model, optim::Algorithm::kSGD);
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

  TEST_CASE("a scaler's scales do not depend on another model in another thread") {
    set_devices("virtual:2");
    const auto train = [] {
      at::manual_seed(1);
      Model model(mlp(), {.name = "own"});
      Optimizer optimizer(model, torch::optim::SGDOptions(1e-4));
      GradScaler scaler({.init_scale = 2, .growth_interval = 1});
      std::vector<double> scales;
      for (int i = 0; i < 6; ++i) {
        scales.push_back(scaler.get_scale());
        model.forward_backward(at::ones({kPoints, 5}), at::ones({kPoints, 3}),
                               [&](const Tensor& x, const Tensor& y) { return scaler.scale(squared_errors(x, y)); });
        model.step(optimizer, {.scaler = &scaler}).wait();
      }
      model.synchronize();
      return scales;
    };
    const std::vector<double> alone = train();
    CHECK(alone == std::vector<double>{2, 2, 4, 8, 16, 32});
    std::atomic<bool> stop{false};
    std::thread other([&] {
      while (!stop) {
        GradScaler scaler;  // comes and goes
        Model model(mlp(), {.name = "other"});
        model.forward_backward(at::ones({2, 5}), at::ones({2, 3}), squared_errors);
        model.synchronize();
      }
    });
    for (int round = 0; round < 3; ++round) CHECK(train() == alone);
    stop = true;
    other.join();
  }

  TEST_CASE("all losses of a model's step share a scale, whatever other models do with the scaler") {
    set_devices("virtual:2");
    at::manual_seed(13);
    Model a(mlp(), {.name = "a"}), b(mlp(), {.name = "b"});
    Optimizer of_a(a, torch::optim::SGDOptions(1e-4)), of_b(b, torch::optim::SGDOptions(1e-4));
    GradScaler scaler({.init_scale = 8, .growth_interval = 1});
    std::vector<double> scales;
    RunOptions one;
    one.microbatches = 1;
    const auto call = [&](Model& model) {
      model.forward_backward(
          at::ones({kPoints, 5}), at::ones({kPoints, 3}),
          [&](const Tensor& x, const Tensor& y) {
            scales.push_back(scaler.get_scale());
            return scaler.scale(squared_errors(x, y));
          },
          one);
    };
    call(a);
    call(b);
    a.step(of_a, {.asynchronous = false, .scaler = &scaler});  // 16 from here on, but for b, which has losses of 8
    call(b);
    call(a);
    b.step(of_b, {.asynchronous = false, .scaler = &scaler});
    call(b);
    CHECK(scales == std::vector<double>{8, 8, 8, 16, 32});

    // A batch that has been submitted keeps its scale, however late its losses are computed.
    a.step(of_a, {.asynchronous = false, .scaler = &scaler});
    scales.clear();
    auto pending = a.submit(
        at::ones({kPoints, 5}), at::ones({kPoints, 3}),
        [&](const Tensor& x, const Tensor& y) { return scaler.scale(squared_errors(x, y)) / scaler.get_scale(); }, one);
    const double norm = a.step(of_a, {.asynchronous = false, .max_grad_norm = 1e9, .scaler = &scaler}).grad_norm();
    CHECK(std::isfinite(norm));
    pending.finish();

    // Losses outside of calls count at the next step that uses the scaler.
    Model c(mlp(), {.name = "c"});
    Optimizer of_c(c, torch::optim::SGDOptions(1e-4));
    GradScaler outside({.init_scale = 4});
    outside.scale(c.forward(at::ones({kPoints, 5})).square().sum()).backward();
    const Step step = c.step(of_c, {.max_grad_norm = 1e9, .scaler = &outside});
    GradScaler unused;
    CHECK_THROWS_WITH_AS(c.step(of_c, {.scaler = &unused}), doctest::Contains("no loss yet"), std::invalid_argument);
    CHECK(step.grad_norm() > 0);
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

  TEST_CASE("NaN is an error unless a scaler belongs to the model") {
    set_devices("virtual:1");
    nn::Sequential layers = mlp();
    Model model(layers);
    const GradScaler of_nobody;
    const auto bad = [](const Tensor& outputs) { return outputs.sum() * std::nan(""); };
    const Tensor batch = at::randn({kPoints, 5});
    CHECK_THROWS_WITH_AS(model.forward_backward(batch, std::tuple<>(), bad), doctest::Contains("NaN"), Error);
    auto pending = model.submit(batch, std::tuple<>(), bad);
    CHECK_THROWS_AS(pending.finish(), Error);
    model.synchronize();
    CHECK_FALSE(layers->parameters()[0].grad().defined());
    {
      GradScaler scaler;
      const auto scaled = [&](const Tensor& outputs) { return scaler.scale(bad(outputs)); };
      CHECK_NOTHROW(model.forward_backward(batch, std::tuple<>(), scaled));
      CHECK_NOTHROW(model.submit(batch, std::tuple<>(), scaled).finish());
      CHECK_NOTHROW(model.forward_backward(batch, std::tuple<>(), bad));
      Model other(mlp(), {.name = "other"});
      CHECK_THROWS_AS(other.forward_backward(batch, std::tuple<>(), bad), Error);
      CHECK_THROWS_AS(other.submit(batch, std::tuple<>(), bad).finish(), Error);
    }
    CHECK_THROWS_AS(model.forward_backward(batch, std::tuple<>(), bad), Error);
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
