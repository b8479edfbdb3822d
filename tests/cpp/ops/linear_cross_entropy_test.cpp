#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include <roundpipe/ops/linear_cross_entropy.h>

using namespace roundpipe::ops;
using Kind = LogitStep::Kind;

namespace linear_cross_entropy_test {

struct Case {
  at::Tensor hidden, weight, bias, labels;
};

Case make_case(int64_t tokens, int64_t width, int64_t vocabulary, at::ScalarType dtype = at::kDouble) {
  at::manual_seed(7);
  Case made;
  made.hidden = at::randn({tokens, width}, at::kDouble).to(dtype);
  made.weight = at::randn({vocabulary, width}, at::kDouble).to(dtype);
  made.bias = at::randn({vocabulary}, at::kDouble).to(dtype);
  made.labels = at::randint(vocabulary, {tokens}, at::kLong);
  return made;
}

struct Outcome {
  double sum = 0;
  at::Tensor hidden, weight, bias;  // gradients in fp64
};

// Token by token and entry by entry, by the chain rule.
Outcome reference(const Case& given, const std::vector<LogitStep>& steps, int64_t ignore_index, bool with_bias) {
  const at::Tensor hidden = given.hidden.to(at::kDouble), weight = given.weight.to(at::kDouble);
  const at::Tensor bias = given.bias.to(at::kDouble);
  Outcome outcome{0, at::zeros_like(hidden), at::zeros_like(weight), at::zeros_like(bias)};
  for (int64_t token = 0; token < hidden.size(0); ++token) {
    const int64_t label = given.labels[token].item<int64_t>();
    if (label == ignore_index) continue;
    std::vector<double> logits, slopes;
    double sum = 0;
    for (int64_t entry = 0; entry < weight.size(0); ++entry) {
      double value = hidden[token].dot(weight[entry]).item<double>();
      if (with_bias) value += bias[entry].item<double>();
      double slope = 1;
      for (const LogitStep& step : steps) {
        if (step.kind == Kind::kMultiply) value *= step.value, slope *= step.value;
        if (step.kind == Kind::kDivide) value /= step.value, slope /= step.value;
        if (step.kind == Kind::kTanh) value = std::tanh(value), slope *= 1 - value * value;
      }
      logits.push_back(value);
      slopes.push_back(slope);
      sum += std::exp(value);
    }
    outcome.sum += std::log(sum) - logits[static_cast<size_t>(label)];
    for (int64_t entry = 0; entry < weight.size(0); ++entry) {
      const auto at = static_cast<size_t>(entry);
      const double gradient = slopes[at] * (std::exp(logits[at]) / sum - (entry == label ? 1 : 0));
      outcome.hidden[token].add_(weight[entry], gradient);
      outcome.weight[entry].add_(hidden[token], gradient);
      outcome.bias[entry].add_(gradient);
    }
  }
  return outcome;
}

Outcome ours(Case given, const LinearCrossEntropyOptions& options, bool with_bias) {
  for (at::Tensor* leaf : {&given.hidden, &given.weight, &given.bias}) *leaf = leaf->clone().requires_grad_(true);
  const auto bias = with_bias ? std::optional(given.bias) : std::nullopt;
  const auto result = linear_cross_entropy(given.hidden, given.weight, bias, given.labels, options);
  std::vector<at::Tensor> inputs{given.hidden, given.weight};
  if (with_bias) inputs.push_back(given.bias);
  const auto gradients = torch::autograd::grad({result.sum}, inputs);
  for (size_t index = 0; index < inputs.size(); ++index) {
    CHECK((gradients[index].scalar_type() == inputs[index].scalar_type()));
  }
  return {result.sum.item<double>(), gradients[0].to(at::kDouble), gradients[1].to(at::kDouble),
          with_bias ? gradients[2].to(at::kDouble) : at::Tensor()};
}

double distance(const at::Tensor& some, const at::Tensor& others) {
  return (some - others).abs().max().item<double>() / std::max(others.abs().max().item<double>(), 1e-300);
}

void check_close(const Outcome& some, const Outcome& others, double bound) {
  CHECK(std::abs(some.sum - others.sum) <= bound * std::max(std::abs(others.sum), 1e-300));
  CHECK(distance(some.hidden, others.hidden) <= bound);
  CHECK(distance(some.weight, others.weight) <= bound);
  if (some.bias.defined()) CHECK(distance(some.bias, others.bias) <= bound);
}

TEST_CASE("linear_cross_entropy: the sum and all gradients, whatever the chunks and steps") {
  Case given = make_case(23, 5, 37);
  given.labels.index_put_({at::tensor({0, 4, 5, 11, 22}, at::kLong)}, at::scalar_tensor(-100, at::kLong));
  const std::vector<std::vector<LogitStep>> all_steps{
      {},
      {{Kind::kMultiply, 0.0625}, {Kind::kFloat32}},
      {{Kind::kDivide, 3}, {Kind::kTanh}, {Kind::kMultiply, 3}, {Kind::kFloat32}},
      {{Kind::kFloat32}, {Kind::kTanh}, {Kind::kMultiply, 2}, {Kind::kTanh}}};
  for (const auto& steps : all_steps) {
    for (const int64_t chunk : {0, 1, 7, 22, 23, 1000}) {
      for (const bool with_bias : {false, true}) {
        CAPTURE(steps.size());
        CAPTURE(chunk);
        CAPTURE(with_bias);
        const LinearCrossEntropyOptions options{.chunk_tokens = chunk, .steps = steps};
        const Outcome expected = reference(given, steps, -100, with_bias);
        check_close(ours(given, options, with_bias), expected, 1e-12);
        Case small = given;
        for (at::Tensor* tensor : {&small.hidden, &small.weight, &small.bias}) *tensor = tensor->to(at::kFloat);
        check_close(ours(small, options, with_bias), reference(small, steps, -100, with_bias), 1e-5);
      }
    }
  }
}

TEST_CASE("linear_cross_entropy: 16-bit gradients are summed over chunks in fp32") {
  // 0.5 and many small parts, which 16 bits would lose if they were added one by one.
  const int64_t tokens = 513;
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    CAPTURE(c10::toString(dtype));
    Case given = make_case(tokens, 3, 2, dtype);
    given.hidden.fill_(1.0 / 1024);
    given.hidden[0].fill_(1);
    given.weight.zero_();
    given.bias.zero_();
    given.labels.zero_();
    const Outcome chunked = ours(given, {.chunk_tokens = 1}, true);
    const double expected = -0.5 - 0.5 * 512 / 1024;
    CHECK(chunked.weight[0][0].item<double>() == expected);
    CHECK(chunked.weight[1][2].item<double>() == -expected);
    CHECK(chunked.bias[0].item<double>() == doctest::Approx(-0.5 * tokens).epsilon(0.005));
  }
}

TEST_CASE("linear_cross_entropy: 16 bits stay close to the same values in fp64") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    CAPTURE(c10::toString(dtype));
    const Case given = make_case(40, 16, 101, dtype);
    const double bound = dtype == at::kBFloat16 ? 0.03 : 0.004;
    for (const int64_t chunk : {0, 9}) {
      const std::vector<LogitStep> steps = softcap_steps(5);
      const LinearCrossEntropyOptions options{.chunk_tokens = chunk, .steps = steps};
      check_close(ours(given, options, true), reference(given, steps, -100, true), bound);
    }
  }
}

TEST_CASE("linear_cross_entropy: nothing to learn from is exactly zero") {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    Case given = make_case(6, 4, 9, dtype);
    given.labels.fill_(3);
    for (const int64_t chunk : {0, 4}) {
      const Outcome none = ours(given, {.ignore_index = 3, .chunk_tokens = chunk}, true);
      CHECK(none.sum == 0);
      for (const at::Tensor& gradient : {none.hidden, none.weight, none.bias}) {
        CHECK(at::equal(gradient, at::zeros_like(gradient)));
      }
    }
    const Outcome empty = ours(make_case(0, 4, 9, dtype), {}, true);
    CHECK(empty.sum == 0);
    CHECK(empty.hidden.sizes() == at::IntArrayRef({0, 4}));
    CHECK(at::equal(empty.weight, at::zeros({9, 4}, at::kDouble)));
    CHECK(at::equal(empty.bias, at::zeros({9}, at::kDouble)));
  }
}

TEST_CASE("linear_cross_entropy: large logits neither overflow nor lose the gradient") {
  Case given = make_case(3, 1, 4, at::kFloat);
  given.hidden.fill_(1);
  given.weight.copy_(at::tensor({1e4, -1e4, 0., 9e3}).view({4, 1}));
  given.labels.copy_(at::tensor({0, 1, 2}, at::kLong));
  const Outcome outcome = ours(given, {.chunk_tokens = 2}, false);
  CHECK(outcome.sum == 3e4);
  CHECK(outcome.hidden.flatten().equal(at::tensor({0., 2e4, 1e4}, at::kDouble)));
}

TEST_CASE("linear_cross_entropy: only what requires a gradient gets one, and leading dimensions are kept") {
  Case given = make_case(24, 4, 9, at::kFloat);
  const at::Tensor labels = given.labels.view({2, 3, 4});
  // Not contiguous in any of its dimensions.
  const at::Tensor hidden = at::randn({4, 4, 3, 2}).permute({3, 2, 1, 0}).requires_grad_(true);
  const auto frozen_weight = linear_cross_entropy(hidden, given.weight, given.bias, labels, {.token_losses = true});
  CHECK(frozen_weight.token_losses.sizes() == labels.sizes());
  CHECK_FALSE(frozen_weight.token_losses.requires_grad());
  CHECK(frozen_weight.token_losses.sum().item<float>() == doctest::Approx(frozen_weight.sum.item<float>()));
  CHECK(torch::autograd::grad({frozen_weight.sum}, {hidden})[0].sizes() == hidden.sizes());

  given.weight.requires_grad_(true);
  const auto frozen_hidden = linear_cross_entropy(hidden.detach(), given.weight, given.bias, labels);
  CHECK_FALSE(frozen_hidden.token_losses.defined());
  CHECK(frozen_hidden.sum.requires_grad());
  const at::NoGradGuard no_grad;
  CHECK_FALSE(linear_cross_entropy(hidden, given.weight, given.bias, labels).sum.requires_grad());
}

TEST_CASE("linear_cross_entropy: the gradient of the result scales all gradients, by an fp32 factor") {
  Case given = make_case(8, 4, 9, at::kBFloat16);
  const Outcome unscaled = ours(given, {}, false);
  given.hidden.requires_grad_(true);
  const auto result = linear_cross_entropy(given.hidden, given.weight, std::nullopt, given.labels);
  // 1 / 3 rounded to bf16 is 0.2% too large.
  const auto scaled = torch::autograd::grad({result.sum}, {given.hidden}, {at::scalar_tensor(1.0 / 3, at::kFloat)})[0];
  CHECK(at::equal(scaled, (unscaled.hidden.to(at::kFloat) * static_cast<float>(1.0 / 3)).to(at::kBFloat16)));
}

TEST_CASE("linear_cross_entropy: backward runs again if the graph is retained; second derivatives are refused") {
  Case given = make_case(8, 4, 9);
  given.hidden.requires_grad_(true);
  const auto run = [&](const at::Tensor& sum, bool create_graph, bool retain_graph = false) {
    return torch::autograd::grad({sum}, {given.hidden}, {}, retain_graph, create_graph)[0];
  };
  const at::Tensor sum = linear_cross_entropy(given.hidden, given.weight, std::nullopt, given.labels).sum;
  CHECK_THROWS_WITH_AS(run(sum, true), doctest::Contains("create_graph"), std::invalid_argument);
  const at::Tensor gradient = run(sum, false, true);
  CHECK(at::equal(run(sum * 2, false, true), gradient * 2));
  CHECK(at::equal(run(sum, false), gradient));
  CHECK_THROWS_WITH_AS(run(sum, false), doctest::Contains("second time"), std::invalid_argument);
}

TEST_CASE("linear_cross_entropy: autocast casts as it does for linear") {
  Case given = make_case(30, 8, 50, at::kFloat);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const Outcome cast = ours(given, {.chunk_tokens = 7}, true);
  const Outcome untouched = ours(make_case(30, 8, 50), {.chunk_tokens = 7}, true);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  check_close(untouched, reference(make_case(30, 8, 50), {}, -100, true), 1e-12);
  Case rounded = given;
  for (at::Tensor* tensor : {&rounded.hidden, &rounded.weight, &rounded.bias}) *tensor = tensor->to(at::kBFloat16);
  CHECK(cast.sum == ours(rounded, {.chunk_tokens = 7}, true).sum);
  check_close(cast, reference(given, {}, -100, true), 0.03);
}

TEST_CASE("linear_cross_entropy: what does not fit together is refused") {
  const Case given = make_case(6, 4, 9, at::kFloat);
  const auto call = [&](const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                        const at::Tensor& labels, const LinearCrossEntropyOptions& options = {}) {
    linear_cross_entropy(hidden, weight, bias, labels, options);
  };
  const auto& [hidden, weight, bias, labels] = given;
  CHECK_THROWS_AS(call(hidden, weight.t(), bias, labels), std::invalid_argument);
  CHECK_THROWS_AS(call(hidden, weight[0], bias, labels), std::invalid_argument);
  CHECK_THROWS_AS(call(hidden, weight.slice(0, 0, 0), bias, labels), std::invalid_argument);
  CHECK_THROWS_AS(call(hidden, weight, bias.slice(0, 1), labels), std::invalid_argument);
  CHECK_THROWS_AS(call(hidden, weight, bias, labels.slice(0, 1)), std::invalid_argument);
  CHECK_THROWS_AS(call(hidden[0][0], weight, bias, labels), std::invalid_argument);
  CHECK_THROWS_AS(call(hidden, weight, bias, labels.to(at::kInt)), std::invalid_argument);
  CHECK_THROWS_AS(call(hidden.to(at::kDouble), weight, bias, labels), std::invalid_argument);
  CHECK_THROWS_AS(call(hidden.to(at::kLong), weight.to(at::kLong), {}, labels), std::invalid_argument);
  CHECK_THROWS_AS(call(hidden, weight, bias, labels, {.chunk_tokens = -1}), std::invalid_argument);
  CHECK_THROWS_AS(call(hidden, weight, bias, labels, {.steps = {{Kind::kDivide, 0}}}), std::invalid_argument);
  CHECK_THROWS_AS(softcap_steps(-1), std::invalid_argument);
  CHECK_THROWS_WITH_AS(call(hidden, weight, bias, labels.clone().fill_(9)),
                       doctest::Contains("[linear_cross_entropy] a label is 9, expected 0 to 8"),
                       std::invalid_argument);
  CHECK_THROWS_AS(call(hidden, weight, bias, labels.clone().fill_(-1)), std::invalid_argument);
  CHECK_NOTHROW(call(hidden, weight, bias, labels.clone().fill_(-1), {.ignore_index = -1}));
}

}  // namespace linear_cross_entropy_test
