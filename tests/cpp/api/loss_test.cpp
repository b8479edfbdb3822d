#include <roundpipe/roundpipe.h>

#include <atomic>
#include <cmath>

#include <doctest/doctest.h>

#include "support/frontend.h"
#include "support/plain_loop.h"

using namespace roundpipe;
using namespace roundpipe::support;
namespace nn = torch::nn;

namespace {

constexpr int64_t kFeatures = 5, kClasses = 4;

nn::Sequential scorer(int64_t outputs = kClasses) {
  return nn::Sequential{nn::Linear(kFeatures, 7), nn::Functional(torch::tanh), nn::Linear(7, outputs)};
}

// A model over virtual devices beside its module's twin, in which plain libtorch computes the whole batch at once.
struct Whole {
  explicit Whole(int devices, int64_t outputs = kClasses) {
    set_devices(concat("virtual:", devices));
    at::manual_seed(3);
    layers = scorer(outputs);
    plain = twin_of(layers);
    model = std::make_unique<Model>(layers);
  }
  template <typename Labels, typename Loss>
  bool same(const Tensor& inputs, const Labels& labels, const Loss& loss, const Tensor& expected) {
    const TrainResult result = model->forward_backward(inputs, labels, loss);
    expected.backward();
    bool same = at::allclose(result.loss, expected.detach(), 1e-4, 1e-6);
    for (size_t i = 0; i < plain->parameters().size(); ++i)
      same &= at::allclose(layers->parameters()[i].grad(), plain->parameters()[i].grad(), 1e-3, 1e-6);
    model->zero_grad();
    plain->zero_grad();
    return same;
  }
  nn::Sequential layers{nullptr}, plain{nullptr};
  std::unique_ptr<Model> model;
};

const auto kMeanOfSquares = [](const Tensor& outputs, const Tensor& label) { return torch::mse_loss(outputs, label); };

}  // namespace

TEST_SUITE("loss") {
  TEST_CASE("a mean is the batch's on any number of devices, and a sum stays a sum") {
    for (const int devices : {1, 2, 4}) {
      for (const int64_t rows : {2, 5, 11, 20}) {  // with microbatches of one row, and of other sizes
        CAPTURE(devices);
        CAPTURE(rows);
        Whole whole(devices);
        const Tensor x = at::randn({rows, kFeatures}), y = at::randn({rows, kClasses});
        const Tensor classes = at::randint(kClasses, {rows}), scales = at::rand({rows, 1}) + 0.5;
        CHECK(whole.same(x, y, kMeanOfSquares, torch::mse_loss(whole.plain->forward(x), y)));
        const auto sum = [](const Tensor& o, const Tensor& l) { return torch::mse_loss(o, l, at::Reduction::Sum); };
        CHECK(whole.same(x, y, sum, sum(whole.plain->forward(x), y)));
        const auto entropy = [](const Tensor& o, const Tensor& l) { return torch::cross_entropy_loss(o, l); };
        CHECK(whole.same(x, classes, entropy, entropy(whole.plain->forward(x), classes)));
        const auto scaled = [](const Tensor& o, const std::tuple<Tensor, Tensor>& l) {
          return (torch::mse_loss(o, std::get<0>(l), at::Reduction::None) * std::get<1>(l)).mean();
        };
        CHECK(whole.same(x, std::tuple(y, scales), scaled, scaled(whole.plain->forward(x), std::tuple(y, scales))));
        const auto alone = [](const Tensor& o) { return o.square().mean(); };
        CHECK(whole.same(x, std::tuple<>(), alone, alone(whole.plain->forward(x))));
      }
    }
  }

  TEST_CASE("one loss function may change from a mean to a sum, call by call") {
    Whole whole(2);
    const Tensor x = at::randn({9, kFeatures}), y = at::randn({9, kClasses});
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::Mean}) {
      const auto loss = [reduction](const Tensor& o, const Tensor& l) { return torch::mse_loss(o, l, reduction); };
      CHECK(whole.same(x, y, loss, loss(whole.plain->forward(x), y)));
    }
  }

  TEST_CASE("labels that are left out do not count in a mean") {
    for (const int devices : {1, 3}) {
      for (const bool padded_first : {false, true}) {
        for (const int64_t ignored : {-100, -1}) {
          CAPTURE(devices);
          CAPTURE(padded_first);
          Whole whole(devices);
          const Tensor x = at::randn({12, kFeatures});
          Tensor classes = at::randint(kClasses, {12});
          // A whole microbatch of them, and others of which some rows count.
          classes.slice(0, padded_first ? 0 : 8, padded_first ? 3 : 12).fill_(ignored);
          classes[5] = ignored;
          const auto entropy = [ignored](const Tensor& o, const Tensor& l) {
            return torch::cross_entropy_loss(o, l, {}, at::Reduction::Mean, ignored);
          };
          CHECK(whole.same(x, classes, entropy, entropy(whole.plain->forward(x), classes)));
        }
      }
    }
  }

  TEST_CASE("a loss that is zero, or whose parts cancel out, is told by its gradients") {
    Whole whole(2, 1);
    const Tensor half = at::randn({4, kFeatures});
    const Tensor x = at::cat({half, half, half});
    const Tensor zero = at::zeros({12, 1});
    // Straight through: the value is 0 whatever the outputs are.
    const auto through = [](const Tensor& o, const Tensor&) { return (o - o.detach()).mean(); };
    CHECK(whole.same(x, zero, through, through(whole.plain->forward(x), zero)));
    const auto through_sum = [](const Tensor& o, const Tensor&) { return (o - o.detach()).sum(); };
    CHECK(whole.same(x, zero, through_sum, through_sum(whole.plain->forward(x), zero)));
    // The first microbatch has no gradient at all, so that the next one has to tell.
    Tensor weights = at::ones({12, 1});
    weights.slice(0, 0, 4).zero_();
    const auto weighted = [](const Tensor& o, const Tensor& l) { return (o.square() * l).mean(); };
    CHECK(whole.same(x, weights, weighted, weighted(whole.plain->forward(x), weights)));
  }

  TEST_CASE("several losses are told one by one; a loss may write to its arguments and draw random numbers") {
    Whole whole(2);
    const Tensor x = at::randn({12, kFeatures}), y = at::randn({12, kClasses});
    const auto two = [](const Tensor& o, const Tensor& l) {
      return std::vector<Tensor>{torch::mse_loss(o, l), o.square().sum() * 0.1};
    };
    const Tensor plain = whole.plain->forward(x);
    const TrainResult result = whole.model->forward_backward(x, y, two);
    CHECK(at::allclose(result.losses[0], torch::mse_loss(plain, y)));
    CHECK(at::allclose(result.losses[1], plain.square().sum() * 0.1));
    whole.model->zero_grad();

    const auto writes = [](Tensor o, Tensor l) {
      l.mul_(2);
      return o.sub_(l).square().mean();
    };
    CHECK(whole.same(x, y, writes, (whole.plain->forward(x) - 2 * y).square().mean()));

    // What the loss draws is the same, whether it was tried or not.
    const auto draws = [](const Tensor& o, const Tensor&) { return (o * at::rand_like(o)).sum(); };
    RunOptions options = whole.model->run_options();
    std::vector<Tensor> losses;
    for (const bool given : {false, true}) {
      options.loss_reduction = given ? std::optional(LossReduction::kSum) : std::nullopt;
      whole.model->set_calls(7);
      losses.push_back(whole.model->forward_backward(x, y, draws, options).loss);
    }
    CHECK(same_bits(losses[0], losses[1]));
  }

  TEST_CASE("the first microbatch is evaluated on two parts more, and nothing if the options say what a loss is") {
    Whole whole(2);
    const Tensor x = at::randn({12, kFeatures}), y = at::randn({12, kClasses});
    std::atomic<int> calls{0};
    const auto counts = [&](const Tensor& o, const Tensor& l) {
      ++calls;
      return torch::mse_loss(o, l);
    };
    whole.model->forward_backward(x, y, counts);
    CHECK(calls.exchange(0) == 3 + 2);
    RunOptions options = whole.model->run_options();
    options.loss_reduction = LossReduction::kMean;
    const Tensor mean = whole.model->forward_backward(x, y, counts, options).loss;
    CHECK(calls.exchange(0) == 3);
    CHECK(at::allclose(mean, torch::mse_loss(whole.plain->forward(x), y)));
    options.microbatches = 1;
    options.loss_reduction = std::nullopt;
    whole.model->forward_backward(x, y, counts, options);
    CHECK(calls == 1);
  }

  TEST_CASE("microbatches that are given, and batches that are cut along another dimension") {
    Whole whole(2);
    const Tensor x = at::randn({7, kFeatures}), y = at::randn({7, kClasses});
    const Microbatches<Tensor> inputs{{x.slice(0, 0, 1), x.slice(0, 1, 5), x.slice(0, 5, 7)}};
    const Microbatches<Tensor> labels{{y.slice(0, 0, 1), y.slice(0, 1, 5), y.slice(0, 5, 7)}};
    const TrainResult result = whole.model->forward_backward(inputs, labels, kMeanOfSquares);
    CHECK(at::allclose(result.loss, torch::mse_loss(whole.plain->forward(x), y)));

    // Time first, as torch's recurrent layers have it.
    nn::Linear linear(kFeatures, kClasses);
    Model model({layer(linear)}, {.name = "time"});
    RunOptions options;
    options.cut_inputs = options.cut_labels = {Cut::along(1)};
    const Tensor steps = at::randn({3, 8, kFeatures}), wanted = at::randn({3, 8, kClasses});
    const Tensor loss = model.forward_backward(steps, wanted, kMeanOfSquares, options).loss;
    CHECK(at::allclose(loss, torch::mse_loss(linear->forward(steps), wanted)));
  }

  TEST_CASE("what is neither a sum nor a mean is said once, and added as it is") {
    Whole whole(2);
    const Tensor x = at::randn({12, kFeatures});
    const auto norm = [](const Tensor& o) { return o.norm(); };
    Tensor expected = at::zeros({});
    for (const Tensor& part : at::tensor_split(x, 3)) expected = expected + whole.plain->forward(part).norm().detach();
    const std::vector<std::string> said = test_frontend.notices_of([&] {
      for (int call = 0; call < 2; ++call)
        CHECK(at::allclose(whole.model->forward_backward(x, std::tuple<>(), norm).loss, expected));
    });
    REQUIRE(said.size() == 1);
    CHECK(said[0].find("neither a sum nor a mean") != std::string::npos);
  }

  TEST_CASE("a loss that only works on whole microbatches, or whose outputs have no rows, is said as well") {
    for (const bool fails : {false, true}) {
      Whole whole(2);
      const Tensor x = at::randn({12, kFeatures});
      const auto picky = [](const Tensor& o) { return o.view({4, kClasses}).square().mean(); };
      Model scalars({layer({}, [](const std::vector<Tensor>&, const Tensor& in) { return in.square().mean(); })},
                    {.name = "scalars"});
      const auto as_it_is = [](const Tensor& loss) { return loss; };
      const std::vector<std::string> said = test_frontend.notices_of([&] {
        fails ? whole.model->forward_backward(x, std::tuple<>(), picky)
              : scalars.forward_backward(x.clone().requires_grad_(), std::tuple<>(), as_it_is);
      });
      REQUIRE(said.size() == 1);
      CHECK(said[0].find(fails ? "it failed" : "none of its outputs") != std::string::npos);
    }
  }

  TEST_CASE("functions that throw nothing are losses and layers, too") {
    struct Doubles : torch::nn::Cloneable<Doubles> {
      void reset() override {}
      Tensor forward(const Tensor& x) noexcept { return x * 2; }
    };
    struct Adds {
      Tensor operator()(const Tensor& o) const noexcept { return o.sum(); }
    };
    struct Takes {
      Tensor operator()(const Tensor& o) const& noexcept { return o.sum(); }
    };
    set_devices("virtual:1");
    nn::Linear linear(kFeatures, 1);
    Model model({layer(linear), layer(std::make_shared<Doubles>())});
    const Tensor x = at::randn({3, kFeatures});
    Tensor (*const pointer)(const Tensor&) noexcept = [](const Tensor& o) noexcept { return o.sum(); };
    const Tensor expected = (linear->forward(x) * 2).sum();
    CHECK(at::allclose(model.forward_backward(x, std::tuple<>(), pointer).loss, expected));
    CHECK(at::allclose(model.forward_backward(x, std::tuple<>(), Adds()).loss, expected));
    CHECK(at::allclose(model.forward_backward(x, std::tuple<>(), Takes()).loss, expected));
  }
}
