#include <roundpipe/training/fused_steps.h>

#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include <roundpipe/roundpipe.h>

#include "support/plain_loop.h"

using namespace roundpipe;
using namespace roundpipe::support;
namespace nn = torch::nn;

namespace {

// Two models in a row and a parameter that the program uses between them, beside plain copies.
struct Group {
  explicit Group(std::optional<int64_t> host_bytes = std::nullopt)
      : first(nn::Linear(5, 9), nn::Functional(torch::tanh)),
        second(nn::Linear(9, 3)),
        scale(at::randn({9}).requires_grad_(true)),
        plain_first(twin_of(first)),
        plain_second(twin_of(second)),
        plain_scale(scale.detach().clone().requires_grad_(true)) {
    models.emplace_back(first);
    models.emplace_back(second);
    FusedSteps::Models cores;
    for (Model& model : models) {
      model.run_options().microbatches = 1;
      const MemoryBudget budget{.host_bytes = cores.empty() ? host_bytes : std::nullopt};
      cores.push_back(std::make_shared<ModelCore>(model.shared_pipeline(), budget, /*checks_loss=*/true));
    }
    steps = std::make_unique<FusedSteps>(cores, FusedSteps::HostParameters{{"scale", scale}});
  }

  TrainedParameters::Named named() const {
    TrainedParameters::Named all{{"scale", scale}};
    for (const auto& [name, parameter] : models[0].parameter_names()) all.emplace_back("first." + name, parameter);
    for (const auto& [name, parameter] : models[1].parameter_names()) all.emplace_back("second." + name, parameter);
    return all;
  }
  void bind(const FusedRule& rule) {
    steps->prepare_bind();
    steps->bind(rule, named(), [&](const Tensor& parameter) { return parameter.is_same(scale) ? 1 : 0; }, nullptr);
  }
  std::vector<Tensor> parameters() const {
    std::vector<Tensor> all{scale};
    for (const auto* layers : {&first, &second})
      for (const Tensor& parameter : (*layers)->parameters()) all.push_back(parameter);
    return all;
  }
  std::vector<Tensor> plain_parameters() const {
    std::vector<Tensor> all{plain_scale};
    for (const auto* layers : {&plain_first, &plain_second})
      for (const Tensor& parameter : (*layers)->parameters()) all.push_back(parameter);
    return all;
  }

  // The losses of a batch, ours and the plain copies'.
  std::pair<double, double> call() {
    const Tensor batch = at::randn({8, 5});
    steps->show_host_weights();
    const Tensor ours = models[1].forward(models[0].forward(batch) * scale).square().sum();
    ours.backward();
    const Tensor theirs = plain_second->forward(plain_first->forward(batch) * plain_scale).square().sum();
    theirs.backward();
    return {ours.item<double>(), theirs.item<double>()};
  }

  nn::Sequential first, second;
  Tensor scale;
  nn::Sequential plain_first, plain_second;
  Tensor plain_scale;
  std::vector<Model> models;
  std::unique_ptr<FusedSteps> steps;
};

FusedRule sgd_of(double lr) {
  optim::Hyperparameters slow, fast;
  slow.lr = lr;
  fast.lr = 2 * lr;
  return {optim::Algorithm::kSGD, {slow, fast}};
}

}  // namespace

TEST_SUITE("fused steps") {
  TEST_CASE("a step is that of all models and of the program's own parameters, each with its group") {
    for (const int devices : {1, 3}) {
      for (const bool asynchronous : {false, true}) {
        CAPTURE(devices);
        CAPTURE(asynchronous);
        set_devices(concat("virtual:", devices, ",debug"));
        at::manual_seed(3);
        Group group;
        const FusedRule rule = sgd_of(0.01);
        group.bind(rule);
        CHECK(group.steps->pipelines().size() == 3);
        // What a call reads one step after an asynchronous one, the plain loop has from one step before.
        std::vector<Tensor> waiting;
        for (int step = 0; step < 4; ++step) {
          const auto [ours, theirs] = group.call();
          CHECK(ours == doctest::Approx(theirs).epsilon(1e-5));
          group.steps->prepare_step(asynchronous);
          group.steps->start_step(rule.groups, {.asynchronous = asynchronous}, 0);
          CHECK(group.steps->hides_weights());
          const at::NoGradGuard no_grad;
          const std::vector<Tensor> plain = group.plain_parameters();
          std::vector<Tensor> next;
          for (size_t i = 0; i < plain.size(); ++i) {
            const Tensor newest = waiting.empty() ? plain[i].clone() : waiting[i];
            next.push_back(newest - rule.groups[i == 0 ? 1 : 0].lr * plain[i].grad());
            plain[i].mutable_grad() = Tensor();
            if (!waiting.empty()) plain[i].copy_(waiting[i]);
            if (!asynchronous) plain[i].copy_(next[i]);
          }
          if (asynchronous) waiting = next;
        }
        group.steps->synchronize();
        CHECK(!group.steps->hides_weights());
        const std::vector<Tensor> ours = group.parameters();
        const std::vector<Tensor> theirs = asynchronous ? waiting : group.plain_parameters();
        for (size_t i = 0; i < theirs.size(); ++i) CHECK(at::allclose(ours[i], theirs[i], 1e-5, 1e-6));
      }
    }
  }

  TEST_CASE("the norm is that of all gradients of the step") {
    set_devices("virtual:2,debug");
    at::manual_seed(4);
    Group group;
    const FusedRule rule = sgd_of(0.01);
    group.bind(rule);
    group.call();
    double squares = 0;
    for (const Tensor& parameter : group.plain_parameters()) squares += parameter.grad().square().sum().item<double>();
    group.steps->prepare_step(false);
    const auto run = group.steps->start_step(
        rule.groups, {.asynchronous = false, .max_grad_norm = std::numeric_limits<double>::infinity()}, 0);
    device::wait_interruptible(*run->decided());
    CHECK(run->norm() == doctest::Approx(std::sqrt(squares)).epsilon(1e-5));
  }

  TEST_CASE("what is refused leaves everything as it was") {
    set_devices("virtual:1,debug");
    Group group(/*host_bytes=*/100);
    const auto all_in_one = [](const at::Tensor&) { return 0; };
    CHECK_THROWS_WITH_AS(group.steps->require_room("optimizer", "the chain", sgd_of(0.1), all_in_one, 1),
                         doctest::Contains("[optimizer] the chain does not fit on the host:"), BudgetExceeded);
    CHECK(!group.steps->optimizer());
    CHECK(!group.steps->host_pipeline());
    CHECK_NOTHROW(Group().steps->require_room("optimizer", "the chain", sgd_of(0.1), all_in_one, 1));
  }

  TEST_CASE("a parameter that becomes trainable later has a name") {
    set_devices("virtual:1,debug");
    Group group;
    group.second->parameters()[0].set_requires_grad(false);
    group.bind(sgd_of(0.1));
    CHECK(!group.steps->late_parameter());
    group.second->parameters()[0].set_requires_grad(true);
    CHECK(group.steps->late_parameter() == "second.0.weight");
    group.second->parameters()[0].set_requires_grad(false);
    group.scale.set_requires_grad(false);  // frozen later: fine
    CHECK(!group.steps->late_parameter());
  }

  TEST_CASE("gradients that are dropped are in no step") {
    set_devices("virtual:2,debug");
    Group group;
    const FusedRule rule = sgd_of(0.1);
    group.bind(rule);
    const std::vector<Tensor> before = [&] {
      std::vector<Tensor> copies;
      for (const Tensor& parameter : group.parameters()) copies.push_back(parameter.detach().clone());
      return copies;
    }();
    group.call();
    group.steps->drop_gradients();
    group.steps->prepare_step(false);
    group.steps->start_step(rule.groups, {.asynchronous = false}, 0);
    group.steps->synchronize();
    CHECK(same_state(group.parameters(), before));
  }
}
