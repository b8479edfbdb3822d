#include <roundpipe/roundpipe.h>

#include <atomic>

#include <doctest/doctest.h>

#include "support/plain_loop.h"

using namespace roundpipe;
using namespace roundpipe::support;
namespace nn = torch::nn;

namespace {

// A struct between layers: tensors, one of which may be missing, and numbers that travel with them.
struct Hidden {
  Tensor values;
  Tensor mask;
  int64_t depth = 0;
};

}  // namespace

template <>
struct roundpipe::TensorsOf<Hidden> {
  template <typename Visit>
  static void visit(Hidden& value, Visit&& visit) {
    visit(value.values);
    visit(value.mask);
  }
};

namespace {

constexpr int64_t kWidth = 6;
constexpr int64_t kWords = 11;
constexpr int64_t kRows = 8;

// Cloneable, with a parameter of its own and a child; takes and returns the struct.
struct BlockImpl : nn::Cloneable<BlockImpl> {
  BlockImpl() { reset(); }
  void reset() override {
    scale = register_parameter("scale", at::rand({kWidth}));
    linear = register_module("linear", nn::Linear(kWidth, kWidth));
  }
  Hidden forward(Hidden hidden) {
    hidden.values = torch::tanh(linear->forward(hidden.values)) * scale;
    if (hidden.mask.defined()) hidden.values = hidden.values * hidden.mask;
    ++hidden.depth;
    return hidden;
  }
  Tensor scale;
  nn::Linear linear{nullptr};
};
TORCH_MODULE(Block);

// Not cloneable, since its constructor takes arguments.
struct Scaled : nn::Module {
  explicit Scaled(double factor) : factor(factor) { weight = register_parameter("weight", at::rand({kWidth})); }
  Tensor forward(const Tensor& a, const Tensor& b) { return (a + b * factor) * weight; }
  double factor;
  Tensor weight;
};

struct Thrower : nn::Cloneable<Thrower> {
  void reset() override {}
  Tensor forward(const Tensor& x) {
    if (*throws) throw std::out_of_range("a layer's own");
    return x * 2;
  }
  std::shared_ptr<std::atomic<bool>> throws = std::make_shared<std::atomic<bool>>(false);
};

Tensor squares(const Tensor& outputs) { return outputs.square().sum(); }

void run(Model& model, Tensor batch) { model.forward_backward(std::move(batch), std::tuple<>(), squares); }

}  // namespace

TEST_SUITE("layer") {
  TEST_CASE("a struct of tensors and numbers between layers") {
    for (const int devices : {1, 3}) {
      for (const bool masked : {false, true}) {
        set_devices(concat("virtual:", devices, ",debug"));
        at::manual_seed(1);
        Block first, second;
        Block plain_first = twin_of(first), plain_second = twin_of(second);
        std::vector<Layer> layers = {layer(first).named("first"), layer(second).named("second")};
        Model model(layers);
        model.run_options().microbatches = 2;
        const Tensor batch = at::randn({kRows, kWidth});
        const Tensor mask = masked ? (at::rand({kRows, kWidth}) > 0.3).to(at::kFloat) : Tensor();
        const TrainResult result = model.forward_backward(
            Hidden{batch, mask, 5}, std::tuple<>(),
            [](const Hidden& hidden) { return hidden.values.square().sum() * static_cast<double>(hidden.depth); });
        Tensor total;
        for (int m = 0; m < 2; ++m) {
          const Tensor part = at::tensor_split(batch, 2)[m];
          const Tensor part_mask = masked ? at::tensor_split(mask, 2)[m] : Tensor();
          const Hidden out = plain_second->forward(plain_first->forward(Hidden{part, part_mask, 5}));
          CHECK(out.depth == 7);
          const Tensor loss = out.values.square().sum() * 7.0;
          loss.backward();
          total = total.defined() ? total + loss.detach() : loss.detach();
        }
        CHECK(same_bits(result.loss, total));
        model.synchronize();
        CHECK(same_state(gradients_of(first->parameters()), gradients_of(plain_first->parameters())));
        CHECK(same_state(gradients_of(second->parameters()), gradients_of(plain_second->parameters())));
        const Hidden outputs = model.forward<Hidden>(Hidden{batch, mask, 0});
        CHECK(outputs.depth == 2);
        CHECK(outputs.mask.defined() == masked);
        CHECK(model.named_parameters().front().first == "first.scale");
      }
    }
  }

  TEST_CASE("several arguments, tuples, vectors and dictionaries") {
    set_devices("virtual:2,debug");
    at::manual_seed(2);
    using Pair = std::tuple<Tensor, Tensor>;
    using Dictionary = torch::OrderedDict<std::string, Tensor>;
    nn::Linear linear(kWidth, kWidth);
    const auto both = [](nn::LinearImpl& module, const Tensor& a, const Tensor& b) {
      return std::vector<Tensor>{module.forward(a), b, a};
    };
    const auto named = [](const std::vector<Tensor>&, const std::vector<Tensor>& list) {
      Dictionary values;
      for (size_t i = 0; i < list.size(); ++i) values.insert(std::to_string(i), list[i] + 1);
      return values;
    };
    const auto last = [](const std::vector<Tensor>& own, const Dictionary& values) {
      return Pair(values["0"] * own[0], values["1"] - values["2"]);
    };
    Tensor factor = at::rand({kWidth}).set_requires_grad(true);
    Model model({layer(linear, both), layer(NamedParameters{}, named), layer({{"factor", factor}}, last)});
    model.run_options().microbatches = 2;
    const Tensor a = at::randn({kRows, kWidth}), b = at::randn({kRows, kWidth});
    const auto [x, y] = model.forward<Pair>(a, b);
    std::vector<Tensor> parts;  // a product of more rows may have other bits
    for (const Tensor& part : at::tensor_split(a, 2)) parts.push_back((linear->forward(part) + 1) * factor);
    CHECK(same_bits(x, at::cat(parts)));
    CHECK(same_bits(y, (b + 1) - (a + 1)));
    // The same tensors, as another row.
    const auto row = model.forward<std::vector<Tensor>>(a, b);
    CHECK(same_bits(row[0], x));
    // A tuple of arguments, and microbatches that the caller has cut unevenly.
    Microbatches<Pair> cut;
    cut.values = {{a.narrow(0, 0, 1), b.narrow(0, 0, 1)}, {a.narrow(0, 1, 7), b.narrow(0, 1, 7)}};
    const auto loss = [](const Pair& outputs) { return (std::get<0>(outputs) * std::get<1>(outputs)).sum(); };
    const Tensor got = model.forward_backward(cut, std::tuple<>(), loss).loss;
    CHECK(at::allclose(got, (x * y).sum(), 1e-4, 1e-4));
    model.synchronize();
    CHECK(factor.grad().defined());
    CHECK(linear->weight.grad().defined());
  }

  TEST_CASE("a module that has no clone needs a factory") {
    set_devices("virtual:2,debug");
    at::manual_seed(3);
    const auto module = std::make_shared<Scaled>(0.5);
    CHECK_THROWS_WITH_AS(Model({layer(module)}), doctest::Contains("made_by"), std::invalid_argument);
    Model model({layer(module).made_by([] { return std::make_shared<Scaled>(0.5); })});
    const Tensor a = at::randn({kRows, kWidth}), b = at::randn({kRows, kWidth});
    CHECK(same_bits(model.forward(a, b), module->forward(a, b)));
    CHECK_THROWS_WITH_AS(Model({layer(module).made_by([] { return std::make_shared<Thrower>(); })}),
                         doctest::Contains("cannot be copied"), std::invalid_argument);
  }

  TEST_CASE("a tied embedding: by the member, as in libtorch, and by tie()") {
    for (const int devices : {1, 2, 4}) {
      for (const bool by_member : {false, true}) {
        set_devices(concat("virtual:", devices, ",debug"));
        at::manual_seed(4);
        nn::Embedding embedding(kWords, kWidth);
        nn::Linear head(nn::LinearOptions(kWidth, kWords).bias(false));
        std::vector<Layer> layers;
        layers.push_back(layer(embedding));
        layers.push_back(layer(nn::Linear(kWidth, kWidth)));
        if (by_member) head->weight = embedding->weight;
        layers.push_back(layer(head));
        if (!by_member) layers.back().tie("weight", embedding->weight);
        const auto middle = std::dynamic_pointer_cast<nn::LinearImpl>(nn::Linear(kWidth, kWidth).ptr());
        Model model(layers);
        model.run_options().microbatches = 3;
        const Tensor tokens = at::randint(kWords, {kRows});
        const Tensor plain = embedding->weight.detach().clone().set_requires_grad(true);
        const Tensor plain_head = plain.detach().clone().set_requires_grad(true);  // has the head's own gradients
        const NamedParameters& named = model.named_parameters();
        const Tensor weight = named[1].second, bias = named[2].second;
        const auto loss = [](const Tensor& outputs, const Tensor& label) {
          return torch::cross_entropy_loss(outputs, label, {}, at::Reduction::Sum);
        };
        const Tensor got = model.forward_backward(tokens, tokens, loss).loss;
        Tensor total;
        for (const Tensor& part : at::tensor_split(tokens, 3)) {
          const Tensor hidden = at::linear(torch::embedding(plain, part), weight.detach(), bias.detach());
          const Tensor own = loss(at::linear(hidden, plain_head), part);
          own.backward();
          total = total.defined() ? total + own.detach() : own.detach();
        }
        CHECK(same_bits(got, total));
        model.synchronize();
        CHECK(same_bits(embedding->weight.grad(), plain_head.grad() + plain.grad()));
      }
    }
  }

  TEST_CASE("what cannot be tied is refused") {
    nn::Linear linear(kWidth, kWidth);
    Layer made = layer(linear);
    CHECK_THROWS_WITH_AS(made.tie("wait", linear->weight), doctest::Contains("weight, bias"), std::invalid_argument);
    CHECK_THROWS_AS(made.tie("weight", at::rand({kWidth})), std::invalid_argument);
    CHECK_THROWS_AS(made.tie("weight", Tensor()), std::invalid_argument);
  }

  TEST_CASE("an error in a layer arrives with its type, and the model goes on") {
    for (const int devices : {1, 3}) {
      set_devices(concat("virtual:", devices));
      at::manual_seed(5);
      const auto thrower = std::make_shared<Thrower>();
      nn::Linear linear(kWidth, kWidth), plain = twin_of(linear);
      Model model({layer(linear), layer(thrower)});
      model.run_options().microbatches = 2;
      const Tensor batch = at::randn({kRows, kWidth});
      run(model, batch);
      *thrower->throws = true;
      CHECK_THROWS_WITH_AS(run(model, batch), "a layer's own", std::out_of_range);
      CHECK_THROWS_AS(model.forward(batch), std::out_of_range);
      *thrower->throws = false;
      run(model, batch);
      model.synchronize();
      for (int i = 0; i < 2; ++i) {
        for (const Tensor& part : at::tensor_split(batch, 2)) squares(plain->forward(part) * 2).backward();
      }
      CHECK(same_state(gradients_of(linear->parameters()), gradients_of(plain->parameters())));
    }
  }

  TEST_CASE("copies may be made in another dtype") {
    set_devices("virtual:2");
    torch::nn::Linear linear(kWidth, kWidth);
    linear->to(at::kBFloat16);
    Model model({layer(linear).made_by([] { return std::make_shared<torch::nn::LinearImpl>(kWidth, kWidth); })});
    const Tensor inputs = at::ones({4, kWidth}, at::kBFloat16);
    for (int call = 0; call < 2; ++call) {
      const Tensor outputs = model.forward(inputs);
      CHECK(at::equal(outputs, linear->forward(inputs)));
    }
  }

  TEST_CASE("values of the wrong type are refused by name") {
    set_devices("virtual:1");
    Block block;
    Model model({layer(block)});
    CHECK_THROWS_WITH_AS(model.forward(at::randn({2, kWidth})), doctest::Contains("Hidden"), std::invalid_argument);
    CHECK_THROWS_AS(model.forward(Hidden{at::randn({2, kWidth}), {}, 0}), std::invalid_argument);
    CHECK(model.forward<Hidden>(Hidden{at::randn({2, kWidth}), {}, 0}).depth == 1);
    CHECK_THROWS_AS(Model(std::vector<Layer>()), std::invalid_argument);
  }
}
