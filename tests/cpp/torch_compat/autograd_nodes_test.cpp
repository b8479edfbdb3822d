#include <roundpipe/torch_compat/autograd_nodes.h>

#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <roundpipe/memory/crossing.h>

using namespace roundpipe::torch_compat;
using roundpipe::memory::kKept_bytes;

namespace {

// Records the memory layout of the gradient of its input.
struct Looks : torch::autograd::Function<Looks> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input, int64_t seen) {
    context->saved_data["seen"] = seen;
    return input * 2;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    *reinterpret_cast<at::Tensor*>(context->saved_data["seen"].toInt()) = gradients[0];
    return {gradients[0] * 2, at::Tensor()};
  }
};

// Makes gradients that begin in the middle of a cache line, in memory of their own.
struct Shifts : torch::autograd::Function<Shifts> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input) { return input * 1; }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const at::Tensor rows = at::ones({10, 3});
    return {roundpipe::memory::copy_alike(rows.narrow(0, 5, 5))};
  }
};

at::Tensor look(const at::Tensor& input, at::Tensor& seen) {
  return Looks::apply(input, reinterpret_cast<int64_t>(&seen));
}

uintptr_t place_of(const at::Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % static_cast<uintptr_t>(kKept_bytes);
}

}  // namespace

TEST_CASE("crossing a boundary: values share memory where they may, may be written to, and keep their gradients") {
  const at::Tensor leaf = at::randn({4, 9}).requires_grad_();
  const at::Tensor hidden = leaf * 3;
  std::vector<at::Tensor> values = cross_boundary({hidden, hidden.slice(1, 0, 9, 4), at::arange(3), hidden});
  CHECK(values[0].is_alias_of(hidden));
  CHECK(values[3].is_same(values[0]));
  CHECK_FALSE(values[1].is_alias_of(hidden));
  CHECK(values[1].is_contiguous());
  CHECK_FALSE(values[2].requires_grad());
  values[0].mul_(2);
  (values[0].sum() + values[1].sum()).backward();
  at::Tensor expected = at::full({4, 9}, 6.0);
  expected.slice(1, 0, 9, 4).add_(3);
  CHECK(at::equal(leaf.grad(), expected));
}

TEST_CASE("crossing a boundary: a copy is made where asked for") {
  const at::Tensor hidden = at::randn({4, 9});
  const std::vector<at::Tensor> values = cross_boundary({hidden, hidden.narrow(0, 1, 2)}, {0, 1});
  CHECK(values[0].is_alias_of(hidden));
  CHECK_FALSE(values[1].is_alias_of(hidden));
  CHECK(at::equal(values[1], hidden.narrow(0, 1, 2)));
}

TEST_CASE("crossing a boundary: gradients arrive as they would from another stage") {
  at::Tensor seen;
  const auto gradient_of = [&](const std::function<at::Tensor(const at::Tensor&)>& next) {
    const at::Tensor leaf = at::randn({6, 8}).requires_grad_();
    next(cross_boundary({look(leaf, seen)})[0]).backward();
    return seen;
  };
  const at::Tensor weights = at::randn({6, 40});
  // Half of a row, and a fifth of one.
  const at::Tensor half =
      gradient_of([&](const at::Tensor& x) { return (at::cat({x, x.detach()}, 1) * weights.narrow(1, 0, 16)).sum(); });
  CHECK(half.strides() == at::IntArrayRef({16, 1}));
  const at::Tensor fifth =
      gradient_of([&](const at::Tensor& x) { return (at::cat({at::zeros({6, 32}), x}, 1) * weights).sum(); });
  CHECK(fifth.is_contiguous());
  CHECK(at::equal(fifth, weights.narrow(1, 32, 8)));
  const at::Tensor same = gradient_of([&](const at::Tensor& x) { return x.sum(); });
  CHECK(same.strides() == at::IntArrayRef({0, 0}));
}

TEST_CASE("crossing a boundary: what a layer adds does not go into the memory of the gradient from above") {
  // The first output's gradient begins in the middle of a cache line; the second output depends on the first.
  for (const bool cut : {false, true}) {
    CAPTURE(cut);
    at::Tensor seen;
    const at::Tensor leaf = at::randn({5, 3}).requires_grad_();
    const at::Tensor first = look(leaf, seen);
    const std::vector<at::Tensor> outputs = {first, first.sin()};
    const at::Tensor ones = at::ones({5, 3});
    if (cut) {
      at::Tensor input = outputs[0].detach();
      Boundary boundary;
      boundary.attach(input);
      torch::autograd::backward({Shifts::apply(input)}, {ones});
      CHECK(place_of(boundary.gradient(0)) == 60);
      torch::autograd::backward(outputs, {boundary.gradient(0), ones});
    } else {
      const std::vector<at::Tensor> values = cross_boundary(outputs);
      torch::autograd::backward({Shifts::apply(values[0]), values[1]}, {ones, ones});
    }
    REQUIRE(seen.defined());
    CHECK(place_of(seen) == 0);
  }
}

TEST_CASE("boundary: hands out gradients settled") {
  Boundary boundary;
  at::Tensor input = at::randn({6, 2});
  boundary.attach(input);
  torch::autograd::backward({at::cat({input, at::zeros({6, 10})}, 1)}, {at::randn({6, 12})});
  CHECK(boundary.gradient(0).is_contiguous());
}
