#include <roundpipe/roundpipe.h>

#include <cmath>
#include <optional>

#include <doctest/doctest.h>

#include <roundpipe/runtime/model_optimizer.h>

#include "support/plain_loop.h"

using namespace roundpipe;
using namespace roundpipe::support;
namespace nn = torch::nn;

namespace {

nn::Sequential mlp(double dropout) {
  return nn::Sequential(nn::Linear(6, 10), nn::Functional(torch::tanh), nn::Dropout(dropout), nn::Linear(10, 4));
}

nn::Sequential convolutions() {
  return nn::Sequential(nn::Conv2d(nn::Conv2dOptions(2, 4, 3).padding(1)), nn::BatchNorm2d(4),
                        nn::ReLU(nn::ReLUOptions().inplace(true)), nn::Flatten(), nn::Linear(4 * 5 * 5, 4));
}

Tensor cross_entropy(const Tensor& outputs, const Tensor& label) {
  return torch::cross_entropy_loss(outputs.to(at::kFloat), label, {}, at::Reduction::Sum);
}

struct Case {
  const char* name;
  std::function<nn::Sequential()> layers;
  std::vector<int64_t> shape;  // of a row
  at::ScalarType dtype = at::kFloat;
};

const std::vector<Case>& cases() {
  static const std::vector<Case> all = {
      {"mlp", [] { return mlp(0); }, {6}},
      {"dropout", [] { return mlp(0.4); }, {6}},
      {"batch norm", [] { return convolutions(); }, {2, 5, 5}},
      {"bf16", [] { return mlp(0.4); }, {6}, at::kBFloat16},
  };
  return all;
}

constexpr int64_t kSamples = 12;

Tensor inputs_of(const Case& tried) {
  std::vector<int64_t> shape = {kSamples};
  shape.insert(shape.end(), tried.shape.begin(), tried.shape.end());
  return at::randn(shape).to(tried.dtype);
}

}  // namespace

TEST_SUITE("model") {
  TEST_CASE("forward_backward is the plain loop, for any devices and microbatches") {
    for (const Case& tried : cases()) {
      for (const int devices : {1, 2, 4}) {
        for (const int microbatches : {1, 3, 6}) {
          CAPTURE(tried.name);
          CAPTURE(devices);
          CAPTURE(microbatches);
          set_devices(concat("virtual:", devices, ",debug"));
          at::manual_seed(7);
          nn::Sequential layers = tried.layers();
          layers->to(tried.dtype);
          nn::Sequential plain = twin_of(layers);
          Model model(layers);
          model.run_options().microbatches = microbatches;
          const PlainStep reference{bodies(plain), cross_entropy, plain->parameters()};
          for (int step = 0; step < 2; ++step) {
            // Two calls: their gradients add up.
            for (int call = 0; call < 2; ++call) {
              const Tensor batch = inputs_of(tried), labels = at::randint(4, {kSamples});
              const auto number = model.calls();
              const TrainResult result = model.forward_backward(batch, labels, cross_entropy);
              CHECK(same_bits(result.loss, reference.run(model, number, batch, labels, microbatches)));
            }
            model.synchronize();
            CHECK(same_state(gradients_of(layers->parameters()), gradients_of(plain->parameters())));
            CHECK(same_state(layers->buffers(), plain->buffers()));
            for (const nn::Sequential& module : {layers, plain}) {
              const at::NoGradGuard no_grad;
              for (Tensor& parameter : module->parameters()) {
                parameter.sub_(parameter.grad(), 0.01);
                parameter.mutable_grad() = Tensor();
              }
            }
          }
          model.synchronize();
          CHECK(same_state(layers->parameters(), plain->parameters()));
        }
      }
    }
  }

  TEST_CASE("a loop of libtorch needs no other line than the call") {
    set_devices("virtual:2,debug");
    at::manual_seed(3);
    nn::Sequential layers = mlp(0.2), plain = twin_of(layers);
    Model model(layers);
    model.run_options().microbatches = 4;
    torch::optim::AdamW ours(layers->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
    torch::optim::AdamW theirs(plain->parameters(), torch::optim::AdamWOptions(0.02).weight_decay(0.1));
    const PlainStep reference{bodies(plain), cross_entropy, plain->parameters()};
    for (int step = 0; step < 5; ++step) {
      const Tensor batch = at::randn({kSamples, 6}), labels = at::randint(4, {kSamples});
      const auto number = model.calls();
      model.forward_backward(batch, labels, cross_entropy);
      reference.run(model, number, batch, labels, 4);
      ours.step();
      ours.zero_grad();
      theirs.step();
      theirs.zero_grad();
    }
    CHECK(same_state(layers->parameters(), plain->parameters()));
  }

  TEST_CASE("autograd goes through the outputs, into parameters and inputs") {
    for (const int devices : {1, 3}) {
      set_devices(concat("virtual:", devices, ",debug"));
      at::manual_seed(5);
      nn::Sequential layers = mlp(0), plain = twin_of(layers);
      nn::Linear before(6, 6), plain_before = twin_of(before);
      Model model(layers);
      model.run_options().microbatches = 1;
      const Tensor batch = at::randn({kSamples, 6});
      const Tensor outputs = model.forward(before(batch));
      const Tensor expected = plain->forward(plain_before(batch));
      CHECK(same_bits(outputs, expected));
      outputs.square().mean().backward();
      expected.square().mean().backward();
      CHECK(same_state(gradients_of(layers->parameters()), gradients_of(plain->parameters())));
      CHECK(same_state(gradients_of(before->parameters()), gradients_of(plain_before->parameters())));
    }
  }

  TEST_CASE("outputs without gradients, in microbatches, in inference mode") {
    set_devices("virtual:2");
    at::manual_seed(6);
    nn::Sequential layers = mlp(0.5);
    layers->eval();
    nn::Sequential plain = twin_of(layers);
    plain->eval();
    Model model(layers);
    const Tensor batch = at::randn({kSamples, 6});
    {
      const at::NoGradGuard no_grad;
      CHECK_FALSE(model.forward(batch).requires_grad());
    }
    const c10::InferenceMode inference;
    RunOptions options;
    options.microbatches = 5;
    const std::vector<Tensor> parts = model.forward_microbatches(options, batch);
    REQUIRE(parts.size() == 5);
    const std::vector<Tensor> rows = at::tensor_split(batch, 5);
    for (size_t m = 0; m < 5; ++m) CHECK(same_bits(parts[m], plain->forward(rows[m])));
    CHECK(same_bits(model.forward_with(options, batch), at::cat(parts)));
  }

  TEST_CASE("layer by layer, and gradients summed by groups of microbatches") {
    for (const int groups : {1, 2}) {
      set_devices("virtual:3,debug");
      at::manual_seed(12);
      nn::Sequential layers = mlp(0.3), plain = twin_of(layers);
      Model model(layers);
      RunOptions options;
      options.microbatches = 4;
      options.gradient_groups = groups;
      options.recompute_grain = RecomputeGrain::kLayer;
      const Tensor batch = at::randn({kSamples, 6}), labels = at::randint(4, {kSamples});
      model.forward_backward(batch, labels, cross_entropy, options);
      model.synchronize();
      const std::vector<Tensor> parts = at::tensor_split(batch, 4), label_parts = at::tensor_split(labels, 4);
      std::vector<std::vector<Tensor>> sums;
      for (size_t m = 0; m < 4; ++m) {
        Tensor hidden = parts[m];
        int l = 0;
        for (const auto& body : bodies(plain)) {
          seed_for(model, 0, m, l++);
          hidden = body(hidden);
        }
        cross_entropy(hidden, label_parts[m]).backward();
        if (groups == 2 && m % 2 == 0) continue;
        if (groups == 1 && m < 3) continue;
        sums.push_back(gradients_of(plain->parameters()));
        for (Tensor& parameter : plain->parameters()) parameter.mutable_grad() = Tensor();
      }
      for (size_t i = 0; i < layers->parameters().size(); ++i) {
        const Tensor expected = groups == 1 ? sums[0][i] : sums[0][i] + sums[1][i];
        CHECK(same_bits(layers->parameters()[i].grad(), expected));
      }
    }
  }

  TEST_CASE("several losses, and outputs that are kept") {
    set_devices("virtual:2");
    Model model(mlp(0));
    const Tensor batch = at::randn({kSamples, 6});
    const auto both = [](const Tensor& outputs) { return std::vector<Tensor>{outputs.sum(), outputs.square().sum()}; };
    const TrainResult result = model.forward_backward(batch, std::tuple<>(), both, {}, /*keep_outputs=*/true);
    REQUIRE(result.losses.size() == 2);
    CHECK(same_bits(result.loss, result.losses[0] + result.losses[1]));
    CHECK(join<Tensor>(*result.outputs).sizes() == at::IntArrayRef({kSamples, 4}));
    CHECK_FALSE(join<Tensor>(*result.outputs).requires_grad());
  }

  TEST_CASE("training flags and requires_grad are followed from call to call") {
    set_devices("virtual:2,debug");
    at::manual_seed(8);
    nn::Sequential layers = mlp(0.5), plain = twin_of(layers);
    Model model(layers);
    model.run_options().microbatches = 2;
    const Tensor batch = at::randn({kSamples, 6}), labels = at::randint(4, {kSamples});
    for (const bool trains : {true, false, true}) {
      layers->train(trains);
      plain->train(trains);
      const PlainStep reference{bodies(plain), cross_entropy, plain->parameters()};
      const auto number = model.calls();
      CHECK(same_bits(model.forward_backward(batch, labels, cross_entropy).loss,
                      reference.run(model, number, batch, labels, 2)));
    }
    model.synchronize();
    for (Tensor& parameter : layers->parameters()) parameter.mutable_grad() = Tensor();
    layers->children()[0]->parameters()[0].set_requires_grad(false);
    model.forward_backward(batch, labels, cross_entropy);
    model.synchronize();
    CHECK_FALSE(layers->parameters()[0].grad().defined());
    CHECK(layers->parameters()[1].grad().defined());
  }

  TEST_CASE("the user's generator does not notice the model") {
    set_devices("virtual:2");
    at::manual_seed(9);
    nn::Sequential layers = mlp(0.5);
    const Tensor batch = at::randn({kSamples, 6}), labels = at::randint(4, {kSamples});
    const auto state = at::detail::getDefaultCPUGenerator().get_state();
    Model model(layers);
    model.forward_backward(batch, labels, cross_entropy);
    model.synchronize();
    CHECK(at::equal(state, at::detail::getDefaultCPUGenerator().get_state()));
  }

  TEST_CASE("submitted batches overlap, and give the same") {
    set_devices("virtual:2,debug");
    at::manual_seed(10);
    nn::Sequential layers = mlp(0.3), plain = twin_of(layers);
    Model model(layers);
    model.run_options().microbatches = 3;
    const PlainStep reference{bodies(plain), cross_entropy, plain->parameters()};
    const Tensor labels = at::randint(4, {kSamples});
    std::vector<Model::Pending> pending;
    std::vector<Tensor> batches;
    for (int i = 0; i < 3; ++i) {
      batches.push_back(at::randn({kSamples, 6}));
      Tensor given = batches.back().clone();
      pending.push_back(model.submit(given, labels, cross_entropy));
      given.zero_();  // taken over already
    }
    for (size_t i = 0; i < 3; ++i) {
      CHECK(same_bits(pending[i].finish().loss, reference.run(model, i, batches[i], labels, 3)));
      CHECK_FALSE(pending[i].records().empty());
    }
    CHECK_THROWS_AS(pending[0].finish(), std::invalid_argument);
    model.synchronize();
    CHECK(same_state(gradients_of(layers->parameters()), gradients_of(plain->parameters())));
  }

  TEST_CASE("plans, costs and a prediction of memory") {
    set_devices("virtual:2,memory=64MB");
    at::manual_seed(11);
    nn::Sequential layers = mlp(0);
    Model model(layers);
    const Tensor batch = at::randn({kSamples, 6}), labels = at::randint(4, {kSamples});
    CHECK_FALSE(model.last_step_plan().has_value());
    const MemoryPrediction prediction = model.predict_memory(batch, labels, cross_entropy);
    CHECK(prediction.device.weights > 0);
    CHECK(prediction.device.work > 0);
    CHECK(prediction.host.weights >= (6 * 10 + 10 + 10 * 4 + 4) * 4);
    CHECK(prediction.host.moments == 2 * prediction.host.weights);
    CHECK(prediction.text().find("on the host") != std::string::npos);
    CHECK(model.calls() == 0);
    for (const Tensor& parameter : layers->parameters()) CHECK_FALSE(parameter.grad().defined());
    model.forward_backward(batch, labels, cross_entropy);
    model.synchronize();
    REQUIRE(model.last_step_plan().has_value());
    CHECK(model.last_step_plan()->microbatches == 3);
    CHECK(model.costs().size() == 4);
    CHECK_FALSE(model.last_records().empty());
    int64_t peak = 0;
    for (const DeviceInfo& device : devices()) peak = std::max(peak, device.peak_bytes);
    CHECK(prediction.device.total() >= peak / 2);
    CHECK(prediction.device.total() <= 4 * peak);
  }

  TEST_CASE("the prediction of the host's memory is that of the model's optimizer") {
    set_devices("virtual:1");
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
      nn::Sequential layers{nn::Linear(64, 64), nn::Linear(64, 64)};
      layers->to(dtype);
      Model model(layers);
      const Tensor batch = at::randn({kSamples, 64}).to(dtype), labels = at::randint(64, {kSamples});
      const auto predicted = [&] { return model.predict_memory(batch, labels, cross_entropy).host; };
      const auto as_optimizer = [&](const UpdateRule& rule, const OptimizerFormat& format) {
        const Optimizer optimizer(model, rule, {}, format);
        const auto host = predicted();
        const auto bytes = optimizer.core()->host_bytes(optimizer.all_options());
        CHECK(host.moments == bytes.moments);
        CHECK(host.masters == bytes.remainders);
        return host;
      };
      const auto before = predicted();
      CHECK(as_optimizer(torch::optim::SGDOptions(0.1), {}).moments == 0);
      CHECK(as_optimizer(torch::optim::AdamWOptions(), {}).moments == before.moments);
      CHECK(as_optimizer(torch::optim::AdamWOptions().amsgrad(true), {}).moments > before.moments);
      CHECK(as_optimizer(torch::optim::AdamWOptions(), {.moments = optim::MomentFormat::kBlockwise8Bit}).moments !=
            before.moments);
      if (dtype == at::kBFloat16) {
        const auto narrow = as_optimizer(torch::optim::SGDOptions(0.1), {.masters = optim::MasterFormat::k24Bit});
        CHECK(narrow.masters == before.masters / 2);
      }
      const auto wide = as_optimizer(torch::optim::SGDOptions(0.1), {.gradients_in_fp32 = true});
      CHECK((wide.gradients > before.gradients) == (dtype == at::kBFloat16));
    }
  }

  TEST_CASE("two models that live have no parameter in common") {
    set_devices("virtual:2");
    at::manual_seed(12);
    nn::Sequential layers = mlp(0);
    const Tensor batch = at::randn({kSamples, 6}), labels = at::randint(4, {kSamples});
    nn::Linear shared(6, 4);
    std::optional<Model> model;
    model.emplace(layers, ModelOptions{.name = "first"});
    CHECK_THROWS_WITH_AS(Model(layers, {.name = "second"}), doctest::Contains("in the model first already"),
                         std::invalid_argument);
    const Model tied({layer(shared)});
    CHECK_THROWS_AS(Model({layer(nn::Linear(6, 6)), layer(shared)}), std::invalid_argument);
    torch::optim::SGD optimizer(layers->parameters(), 0.1);
    const Tensor before = layers->parameters()[0].detach().clone();
    model->forward_backward(batch, labels, cross_entropy);
    model->step(optimizer);
    const Tensor after = layers->parameters()[0].detach().clone();
    CHECK_FALSE(same_bits(before, after));
    Model moved(std::move(*model));
    CHECK_THROWS_AS(Model{layers}, std::invalid_argument);

    // What the model leaves behind keeps its hands off once another one has the parameters.
    auto pending = moved.submit(batch, labels, cross_entropy);
    const Tensor outputs = moved.forward(batch);
    moved = Model(mlp(0));
    Model again(layers);
    CHECK_THROWS_WITH_AS(outputs.sum().backward(), doctest::Contains("another model"), std::exception);
    again.forward_backward(batch, labels, cross_entropy);
    again.step(optimizer);
    const Tensor newest = layers->parameters()[0].detach().clone();
    CHECK_FALSE(same_bits(after, newest));
    pending.finish();
    again.synchronize();
    CHECK(same_bits(newest, layers->parameters()[0]));
  }

  TEST_CASE("moving an object into itself changes nothing") {
    set_devices("virtual:1");
    at::manual_seed(13);
    nn::Sequential layers = mlp(0);
    Model model(layers);
    Optimizer optimizer(model, torch::optim::SGDOptions(0.1));
    optimizer.set_learning_rate(constant_rate());
    Layer one = layer(nn::Linear(6, 4)).named("a name that is too long to lie in the string itself");
    const auto into_itself = [](auto& object) {
      auto& same = object;
      object = std::move(same);
    };
    into_itself(model);
    into_itself(optimizer);
    into_itself(one);
    const Tensor batch = at::randn({kSamples, 6}), labels = at::randint(4, {kSamples});
    auto pending = model.submit(batch, labels, cross_entropy);
    into_itself(pending);
    CHECK(std::isfinite(pending.finish().loss.item<double>()));
    Step step = model.step(optimizer, {.max_grad_norm = 1});
    into_itself(step);
    CHECK(step.grad_norm() > 0);
    CHECK(optimizer.options().lr == 0.1);
    CHECK(one.name().size() > 40);
    CHECK(one.parameters().size() == 2);
  }
}
