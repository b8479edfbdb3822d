#include <roundpipe/ops/encoded_product.h>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include <roundpipe/ops/grouped_product.h>
#include <roundpipe/ops/projection.h>

namespace roundpipe::ops {

using at::Tensor;

namespace {

Weight encoded(const Tensor& numbers, const char* format, bool transposed = false) {
  const quantise::Format& found = quantise::find_format(format);
  return quantise::EncodedTensor({&found, numbers.scalar_type(), transposed}, found.encode(numbers));
}

// Values and gradients of `of_weight` have the same bits as with the decoded numbers.
template <typename OfWeight>
void compare(const Weight& weight, const Tensor& input, const Tensor& bias, const OfWeight& of_weight) {
  const auto run = [&](const Weight& used) {
    const Tensor given = input.detach().requires_grad_(),
                 added = bias.defined() ? bias.detach().requires_grad_() : bias;
    const Tensor result = of_weight(given, used, added);
    std::vector<Tensor> wanted = {given};
    if (bias.defined()) wanted.push_back(added);
    std::vector<Tensor> found = torch::autograd::grad({result}, wanted, {at::cos(result.detach())});
    found.push_back(result);
    return found;
  };
  const std::vector<Tensor> plain = run(weight.values()), own = run(weight);
  CAPTURE(input.sizes());
  CAPTURE(input.scalar_type());
  for (size_t i = 0; i < plain.size(); ++i) {
    CAPTURE(i);
    CHECK((plain[i].scalar_type() == own[i].scalar_type()));
    CHECK(at::equal(plain[i], own[i]));
  }
}

}  // namespace

TEST_CASE("encoded products: linear, with the bits of the decoded weight") {
  at::manual_seed(0);
  for (const char* const format : {"nf4", "nf4-double", "mxfp4", "int8"}) {
    for (const auto dtype : {at::kBFloat16, at::kFloat}) {
      const Weight weight = encoded(at::randn({48, 64}).to(dtype), format);
      const auto linear = [](const Tensor& input, const Weight& used, const Tensor& bias) {
        return project(input, {used, bias.defined() ? std::optional(bias) : std::nullopt});
      };
      for (const Tensor& bias : {Tensor(), at::randn({48}).to(dtype)}) {
        compare(weight, at::randn({2, 5, 64}).to(dtype), bias, linear);
        compare(weight, at::randn({7, 64}).to(dtype), bias, linear);
        compare(weight, at::randn({64, 7}).to(dtype).t(), bias, linear);
        compare(weight, at::randn({5, 2, 64}).to(dtype).transpose(0, 1), bias, linear);
        compare(weight, at::randn({64}).to(dtype), bias, linear);
      }
    }
  }
}

TEST_CASE("encoded products: of experts, with the bits of the decoded weights") {
  at::manual_seed(0);
  const Tensor ends = at::tensor({2, 2, 7, 9}, at::kInt);
  for (const auto dtype : {at::kBFloat16, at::kFloat}) {
    const Tensor numbers = at::randn({4, 32, 64}).to(dtype);
    for (const bool transposed : {false, true}) {
      const Weight weight = encoded(numbers, "mxfp4", transposed);
      for (const Stacked way : {Stacked::kOutputsFirst, Stacked::kInputsFirst}) {
        const int64_t from = weight.size(way == Stacked::kOutputsFirst ? 2 : 1);
        compare(weight, at::randn({9, from}).to(dtype), {},
                [&](const Tensor& input, const Weight& used, const Tensor&) {
                  return grouped_product(input, used, ends, way);
                });
      }
      compare(weight.select({2})[0], at::randn({9, weight.size(1)}).to(dtype), {},
              [&](const Tensor& input, const Weight& used, const Tensor&) { return times(input, used); });
    }
  }
}

TEST_CASE("encoded products: autocast casts as it does for the decoded weight") {
  at::manual_seed(0);
  const Weight weight = encoded(at::randn({32, 64}), "nf4");
  at::autocast::set_autocast_enabled(at::kCPU, true);
  compare(weight, at::randn({3, 4, 64}), at::randn({32}),
          [](const Tensor& input, const Weight& used, const Tensor& bias) { return project(input, {used, bias}); });
  at::autocast::set_autocast_enabled(at::kCPU, false);
  at::autocast::clear_cache();
}

TEST_CASE("encoded products: a graph keeps no numbers, and reads those of its forward") {
  at::manual_seed(0);
  const Tensor numbers = at::randn({64, 64});
  const Weight weight = encoded(numbers, "nf4");
  const Tensor input = at::randn({4, 64}).requires_grad_(), expected = weight.values();
  const Tensor result = project(input, {weight});
  // As where a layer's memory is released: the handles point elsewhere.
  for (const Tensor& part : weight.parts()) {
    Tensor handle = part;
    handle.set_data(at::empty({0}, part.options()));
  }
  const Tensor gradient = at::randn({4, 64});
  CHECK(at::equal(torch::autograd::grad({result}, {input}, {gradient})[0], gradient.mm(expected)));
}

TEST_CASE("encoded products: nobody reads the values, and without a graph") {
  at::manual_seed(0);
  const Weight weight = encoded(at::randn({32, 64}), "nf4");
  const Tensor input = at::randn({4, 64}).requires_grad_(), gradient = at::randn({4, 32});
  const Tensor result = project(input, {weight}, {.is_read = false});
  CHECK((result.sizes() == at::IntArrayRef{4, 32}));
  CHECK(at::equal(torch::autograd::grad({result}, {input}, {gradient})[0], gradient.mm(weight.values())));
  CHECK_FALSE(project(input.detach(), {weight}).requires_grad());
  const at::NoGradGuard no_grad;
  CHECK_FALSE(project(input, {weight}).requires_grad());
}

}  // namespace roundpipe::ops
