#include <roundpipe/core/error.h>
#include <roundpipe/runtime/model/shells.h>

#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include "support/model.h"

using namespace roundpipe::runtime;
using namespace roundpipe::runtime::support;

namespace shells_test {

constexpr int64_t kWidth = 4;

TEST_SUITE("shells") {
  TEST_CASE("a shell is made once for a worker, refreshed when the layer is another, and gone with its worker") {
    const auto model = make_model({linear_layer("a", kWidth), linear_layer("b", kWidth)});
    const c10::Device host(c10::DeviceType::CPU);
    const std::shared_ptr<const void> before = std::make_shared<int>(1), after = std::make_shared<int>(2);
    ShellCounts& counts = shell_counts();
    const int made = counts.made, alive = counts.alive, refreshed = counts.refreshed;
    const auto get = [&](int worker, size_t layer, const std::shared_ptr<const void>& attributes) -> Shell& {
      return model->shells.get(worker, layer, *model->layers[layer]->layer, host, attributes);
    };
    Shell& first = get(0, 0, before);
    CHECK(&get(0, 0, before) == &first);
    CHECK(&get(0, 1, before) != &first);
    CHECK(&get(1, 0, before) != &first);
    CHECK(counts.made == made + 3);
    CHECK(counts.refreshed == refreshed + 3);
    CHECK(&get(0, 0, after) == &first);
    CHECK(counts.refreshed == refreshed + 4);
    CHECK(&get(0, 0, before) == &first);  // as the layer was for that call
    CHECK(counts.refreshed == refreshed + 5);
    model->shells.keep({1, 2});
    CHECK(counts.alive == alive + 1);
    model->shells.keep({});
    CHECK(counts.alive == alive);
  }

  TEST_CASE("a sink takes gradients where they are to go and leaves none on the leaf") {
    const auto model = make_model({linear_layer("a", 2)});
    Shell& shell = model->shells.get(0, 0, *model->layers[0]->layer, c10::Device(c10::DeviceType::CPU), nullptr);
    at::Tensor weight = shell.layer->parameters[0];
    weight.set_data(at::ones({2, 2}));
    weight.set_requires_grad(true);
    shell.sink.reset(2);
    const at::Tensor target = at::full({2, 2}, 100.0);
    shell.sink.targets[0] = target;
    for (const double expected : {3.0, 6.0}) {
      torch::autograd::backward({(weight * 3).sum()}, {});
      CHECK(target.equal(at::full({2, 2}, expected)));
      CHECK_FALSE(weight.grad().defined());
    }
    // Without a target, the gradient is kept for the layers that share the parameter.
    shell.sink.reset(2);
    torch::autograd::backward({(weight * 5).sum()}, {});
    CHECK(shell.sink.tied[0].equal(at::full({2, 2}, 5.0)));
  }

  TEST_CASE("a microbatch that runs anew adds what had not come, once") {
    GradientSink sink;
    sink.reset(2);
    sink.targets = {at::zeros({2}), at::zeros({2})};
    const auto ones = [] { return at::ones({2}); };
    sink.begin_microbatch();
    sink.consume(0, ones());
    REQUIRE(sink.can_retry());
    sink.retry();
    sink.consume(0, ones());
    sink.consume(1, ones());
    sink.begin_microbatch();
    sink.consume(0, ones());
    CHECK(at::equal(sink.targets[0], at::full({2}, 2.0)));
    CHECK(at::equal(sink.targets[1], ones()));
    // A gradient in several parts cannot be told from one that arrives again.
    sink.consume(0, ones());
    CHECK_FALSE(sink.can_retry());
  }

  TEST_CASE("a sink takes products and gradients in fp32, once, where it has a sum in fp32") {
    GradientSink sink;
    sink.reset(3);
    sink.targets = {at::zeros({2, 2}), at::zeros({2, 2}, at::kDouble), at::Tensor()};
    const at::Tensor left = at::ones({2, 3}, at::kBFloat16), right = at::ones({3, 2}, at::kBFloat16);
    sink.begin_microbatch();
    CHECK(sink.add_product(0, left, right));
    CHECK_FALSE(sink.add_product(1, left, right));
    CHECK_FALSE(sink.add_product(2, left, right));
    CHECK_FALSE(sink.add_product(0, left.to(at::kFloat), right.to(at::kFloat)));
    CHECK(at::equal(sink.targets[0], at::full({2, 2}, 3.0)));
    REQUIRE(sink.can_retry());
    sink.retry();
    CHECK(sink.add_product(0, left, right));
    CHECK(at::equal(sink.targets[0], at::full({2, 2}, 3.0)));
    sink.begin_microbatch();
    CHECK(sink.add_wide(0, at::full({2, 2}, 0.5)));
    CHECK_FALSE(sink.add_wide(2, at::ones({2, 2})));
    CHECK(at::equal(sink.targets[0], at::full({2, 2}, 3.5)));
    CHECK(sink.add_product(0, left, right));
    CHECK(at::equal(sink.targets[0], at::full({2, 2}, 6.5)));
    CHECK_FALSE(sink.can_retry());
    // Of two products of one weight, the first had been added when memory ran out.
    sink.begin_microbatch();
    CHECK(sink.add_product(0, left, right));
    REQUIRE(sink.can_retry());
    sink.retry();
    CHECK(sink.add_product(0, left, right));
    CHECK(sink.add_product(0, left, right));
    CHECK(at::equal(sink.targets[0], at::full({2, 2}, 12.5)));
    sink.close(0);
    sink.begin_microbatch();
    CHECK_THROWS_AS(sink.add_product(0, left, right), roundpipe::Error);
  }
}

}  // namespace shells_test
