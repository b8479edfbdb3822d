#include <roundpipe/api/model_group.h>

#include <cmath>
#include <limits>

#include <doctest/doctest.h>
#include <roundpipe/roundpipe.h>

#include "support/chain.h"

using namespace roundpipe;
using namespace roundpipe::support;
namespace nn = torch::nn;

namespace {

// Two modules in the pipeline, one on the host between them, and a plain copy of it all.
struct TwoModels {
  TwoModels() {
    for (Model* const model : {&first, &second}) model->run_options().microbatches = 1;
  }
  Tensor call(const Tensor& batch) { return second.forward(bridge(first.forward(batch))); }
  Tensor call_plain(const Tensor& batch) { return plain_decoder->forward(plain_bridge(plain_encoder->forward(batch))); }
  std::vector<Tensor> parameters() const {
    return joined({encoder->parameters(), bridge->parameters(), decoder->parameters()});
  }
  std::vector<Tensor> plain_parameters() const {
    return joined({plain_encoder->parameters(), plain_bridge->parameters(), plain_decoder->parameters()});
  }
  static std::vector<Tensor> joined(const std::vector<std::vector<Tensor>>& parts) {
    std::vector<Tensor> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
  }
  ModelGroup group() {
    return {{{"encoder", &first}, {"decoder", &second}},
            {{"bridge.weight", bridge->weight}, {"bridge.bias", bridge->bias}}};
  }

  nn::Sequential encoder{nn::Linear(5, 9), nn::Functional(torch::tanh), nn::Linear(9, 8)};
  nn::Linear bridge{8, 8};
  nn::Sequential decoder{nn::Linear(8, 3)};
  nn::Sequential plain_encoder = twin_of(encoder), plain_decoder = twin_of(decoder);
  nn::Linear plain_bridge = twin_of(bridge);
  Model first{encoder, {.name = "first"}}, second{decoder, {.name = "second"}};
};

Tensor sum_of_squares(const Tensor& outputs) { return outputs.square().sum(); }

const auto kGroupRule = torch::optim::SGDOptions(0.01).momentum(0.9);

}  // namespace

TEST_SUITE("model group") {
  TEST_CASE("steps of a group have the bits of one plain loop over all of it") {
    for (const int devices : {1, 3}) {
      set_devices(concat("virtual:", devices, ",debug"));
      at::manual_seed(1);
      TwoModels whole;
      Optimizer ours(
          whole.group(), kGroupRule,
          {{[](const std::string& name, const Tensor&) { return name == "bridge.bias" || name == "decoder.0.bias"; },
            {.lr = 0.005}}});
      std::vector<Tensor> slower{whole.plain_bridge->bias, whole.plain_decoder->parameters()[1]}, others;
      for (const Tensor& parameter : whole.plain_parameters()) {
        if (!parameter.is_same(slower[0]) && !parameter.is_same(slower[1])) others.push_back(parameter);
      }
      torch::optim::SGD theirs(
          {torch::optim::OptimizerParamGroup(
               slower, std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.005).momentum(0.9))),
           torch::optim::OptimizerParamGroup(others, std::make_unique<torch::optim::SGDOptions>(kGroupRule))},
          kGroupRule);
      for (int step = 0; step < 4; ++step) {
        for (int call = 0; call < (step == 2 ? 2 : 1); ++call) {  // gradients of two calls
          const Tensor batch = at::randn({6, 5});
          const Tensor loss = sum_of_squares(whole.call(batch)), expected = sum_of_squares(whole.call_plain(batch));
          CHECK(alike({loss}, {expected}));
          loss.backward();
          expected.backward();
        }
        const double limit = std::numeric_limits<double>::infinity();
        const Step made = ours.step({.asynchronous = false, .max_grad_norm = limit});
        CHECK(made.grad_norm() == doctest::Approx(nn::utils::clip_grad_norm_(whole.plain_parameters(), limit)));
        theirs.step();
        theirs.zero_grad();
      }
      whole.second.synchronize();
      CHECK(alike(whole.parameters(), whole.plain_parameters()));
      CHECK(ours.steps() == 4);
    }
  }

  TEST_CASE("an asynchronous step is read by the call after the next, also on the host") {
    set_devices("virtual:2,debug");
    at::manual_seed(2);
    TwoModels whole;
    Optimizer optimizer(whole.group(), torch::optim::SGDOptions(0.001));
    const Tensor batch = at::randn({6, 5});
    std::vector<double> losses;
    for (int i = 0; i < 3; ++i) {
      const Tensor loss = sum_of_squares(whole.call(batch));
      losses.push_back(loss.item<double>());
      loss.backward();
      whole.first.step(optimizer);  // of the whole as well
    }
    CHECK(losses[1] == losses[0]);
    CHECK(losses[2] < losses[1]);
    // Dropping one model leaves all with the newest weights.
    const Tensor before = whole.bridge->weight.detach().clone();
    {
      const Model gone = std::move(whole.second);
    }
    CHECK_FALSE(at::equal(before, whole.bridge->weight));
  }

  TEST_CASE("norm, schedule, scaler and zero_grad are those of all") {
    set_devices("virtual:2");
    at::manual_seed(3);
    TwoModels whole;
    Optimizer optimizer(whole.group(), torch::optim::SGDOptions(0.5));
    optimizer.set_learning_rate([](int64_t step) { return step == 0 ? 1.0 : 0.0; });
    const Tensor batch = at::randn({6, 5});
    sum_of_squares(whole.call(batch)).backward();
    optimizer.zero_grad();
    const std::vector<Tensor> before = copies_of(whole.parameters());
    optimizer.step({.asynchronous = false});
    CHECK(same_state(before, whole.parameters()));
    CHECK(optimizer.options().lr == 0);

    optimizer.set_learning_rate(nullptr);
    optimizer.options().lr = 0.5;
    GradScaler scaler({.init_scale = 8});
    scaler.scale(sum_of_squares(whole.call(batch))).backward();
    whole.bridge->bias.mutable_grad().fill_(std::nan(""));  // on the host, and nothing is stepped
    CHECK(optimizer.step({.scaler = &scaler}).skipped());
    whole.first.synchronize();
    CHECK(same_state(before, whole.parameters()));
    CHECK(scaler.get_scale() == 4);

    scaler.scale(sum_of_squares(whole.call(batch))).backward();
    sum_of_squares(whole.call_plain(batch)).backward();
    const double norm = nn::utils::clip_grad_norm_(whole.plain_parameters(), 1.0);
    const Step clipped = optimizer.step({.asynchronous = false, .max_grad_norm = 1.0, .scaler = &scaler});
    CHECK(clipped.grad_norm() == doctest::Approx(norm));
    whole.first.synchronize();
    torch::optim::SGD(whole.plain_parameters(), 0.5).step();
    for (size_t i = 0; i < before.size(); ++i)
      CHECK(at::allclose(whole.parameters()[i], whole.plain_parameters()[i], 1e-5, 1e-6));
  }

  TEST_CASE("a parameter that has two names is stepped once") {
    set_devices("virtual:1");
    TwoModels whole;
    const Tensor& weight = whole.bridge->weight;
    const ModelGroup group{{{"a", &whole.first}}, {{"one", weight}, {"other", weight}}};
    Optimizer optimizer(group, torch::optim::SGDOptions(0.5));
    const Tensor expected = weight.detach() - 0.5 * at::full_like(weight, 2);
    (weight * 2).sum().backward();
    optimizer.step({.asynchronous = false});
    whole.first.synchronize();
    CHECK(at::equal(weight, expected));
  }

  TEST_CASE("wrong use") {
    set_devices("virtual:1");
    TwoModels whole;
    const auto refused = [](const ModelGroup& group, const char* text) {
      CHECK_THROWS_WITH_AS(Optimizer(group, kGroupRule), doctest::Contains(text), std::invalid_argument);
    };
    refused({}, "no models");
    refused({{{"a", nullptr}}}, "'a' is null");
    refused({{{"a", &whole.first}, {"b", &whole.first}}}, "'b' is given twice");
    refused({{{"a", &whole.first}, {"a", &whole.second}}}, "'a' is given twice");
    refused({{{"a", &whole.first}}, {{"sum", whole.bridge->weight + 1}}}, "'sum' of the program is no leaf");
    const Tensor& weight = whole.bridge->weight;
    refused({{{"a", &whole.first}}, {{"w", weight}, {"w", whole.bridge->bias}}}, "two parameters are named 'w'");
    refused({{{"a", &whole.first}}, {{"a.0.weight", weight}}}, "two parameters are named 'a.0.weight'");
    refused({{{"a", &whole.first}}, {{"own", whole.decoder->parameters()[0]}}},
            "own' of host is in the model second already");
    Optimizer optimizer(whole.group(), kGroupRule);
    refused({{{"encoder", &whole.first}}}, "first has an Optimizer that steps it together with other");
    TwoModels other;
    CHECK_THROWS_WITH_AS(other.first.step(optimizer), doctest::Contains("not made for this model"),
                         std::invalid_argument);
    Optimizer second(whole.group(), kGroupRule);
    CHECK_THROWS_WITH_AS(optimizer.step(), doctest::Contains("another optimizer was made"), std::invalid_argument);
    torch::optim::SGD plain(whole.encoder->parameters(), 0.1);
    CHECK_THROWS_AS(whole.first.step(plain), std::invalid_argument);
    TwoModels frozen;
    frozen.bridge->weight.set_requires_grad(false);
    Optimizer third(frozen.group(), kGroupRule);
    frozen.bridge->weight.set_requires_grad(true);
    CHECK_THROWS_WITH_AS(third.step(), doctest::Contains("'bridge.weight' was frozen"), std::invalid_argument);
  }
}
