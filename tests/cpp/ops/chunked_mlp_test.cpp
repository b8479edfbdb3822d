#include <cmath>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

#include <roundpipe/ops/chunked_mlp.h>

using namespace roundpipe::ops;

namespace chunked_mlp_test {

at::Tensor leaf(at::IntArrayRef shape, at::ScalarType dtype = at::kDouble) {
  return at::randn(shape, at::kDouble).to(dtype).requires_grad_(true);
}

double distance(const at::Tensor& some, const at::Tensor& others) {
  REQUIRE(some.sizes() == others.sizes());
  const at::Tensor expected = others.to(at::kDouble);
  return (some.to(at::kDouble) - expected).abs().max().item<double>() / expected.abs().max().item<double>();
}

// Returns body(input) and the gradients of `inputs`, for a fixed gradient of the result.
std::vector<at::Tensor> with_gradients(const at::Tensor& output, const std::vector<at::Tensor>& inputs) {
  const at::Tensor gradient =
      at::arange(output.numel(), at::kDouble).sin_().view(output.sizes()).to(output.scalar_type());
  std::vector<at::Tensor> found = torch::autograd::grad({output}, inputs, {gradient});
  found.push_back(output.detach());
  return found;
}

TEST_CASE("chunked_map: values and gradients are those of the body, whatever the chunks") {
  at::manual_seed(1);
  const at::Tensor input = leaf({2, 11, 3}), weight = leaf({4, 3}), unused = leaf({2});
  const at::Tensor bias = leaf({4}) * 2;  // not a leaf: gradients stop here
  const TokenwiseBody body = [&](const at::Tensor& tokens) { return at::linear(tokens, weight, bias).sin(); };
  const std::vector<at::Tensor> inputs{input, weight, bias};
  const auto expected = with_gradients(body(input), inputs);
  for (const int64_t chunk : {1, 4, 10, 11, 100}) {
    for (const int64_t dim : {-2, 1}) {
      CAPTURE(chunk);
      const auto found =
          with_gradients(chunked_map(body, input, {weight, bias, unused}, {.chunk_tokens = chunk, .dim = dim}), inputs);
      for (size_t index = 0; index < expected.size(); ++index) {
        CHECK(distance(found[index], expected[index]) < 1e-13);
      }
    }
  }
  const auto along_first =
      with_gradients(chunked_map(body, input, {weight, bias}, {.chunk_tokens = 1, .dim = 0}), inputs);
  for (size_t index = 0; index < expected.size(); ++index) CHECK(distance(along_first[index], expected[index]) < 1e-13);
}

TEST_CASE("chunked_map: nothing is computed for what is frozen") {
  at::manual_seed(2);
  const at::Tensor input = at::randn({9, 3}), weight = at::randn({4, 3}), bias = at::randn({4});
  std::vector<bool> recorded;
  const TokenwiseBody body = [&](const at::Tensor& tokens) {
    recorded.push_back(at::GradMode::is_enabled() && tokens.requires_grad());
    return at::linear(tokens, weight, bias);
  };
  const ChunkedMapOptions options{.chunk_tokens = 4};
  CHECK_FALSE(chunked_map(body, input, {weight, bias}, options).requires_grad());
  CHECK(recorded == std::vector<bool>{false, false, false});

  bias.requires_grad_(true);
  recorded.clear();
  const at::Tensor output = chunked_map(body, input, {weight, bias}, options);
  CHECK(at::equal(torch::autograd::grad({output.sum()}, {bias})[0], at::full({4}, 9.0F)));
  CHECK(recorded == std::vector<bool>(6, false));
}

TEST_CASE("chunked_map: 16-bit gradients are summed in fp32 and rounded once") {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor scale = at::ones({1}, dtype).requires_grad_(true);
    at::Tensor input = at::full({513, 1}, 1.0 / 1024, dtype);
    input[0] = 1;
    const TokenwiseBody body = [&](const at::Tensor& tokens) { return tokens * scale; };
    const at::Tensor output = chunked_map(body, input, {scale}, {.chunk_tokens = 1});
    CHECK(torch::autograd::grad({output.sum()}, {scale})[0].item<double>() == 1.5);
  }
}

TEST_CASE("chunked_map: the backward pass draws the same numbers, and leaves the generator where it was") {
  const at::Tensor input = at::ones({64, 8}).requires_grad_(true);
  int calls = 0;
  // The second chunk draws nothing.
  const TokenwiseBody body = [&](const at::Tensor& tokens) {
    return calls++ % 4 == 1 ? tokens * 2 : at::dropout(tokens, 0.5, true);
  };
  at::manual_seed(3);
  const at::Tensor output = chunked_map(body, input, {}, {.chunk_tokens = 16});
  const at::Tensor after_forward = at::rand({4});
  const at::Tensor gradient = torch::autograd::grad({output.sum()}, {input})[0];
  const at::Tensor after_backward = at::rand({4});
  CHECK(at::equal(gradient, output));

  at::manual_seed(3);
  calls = 0;
  const at::NoGradGuard no_grad;
  CHECK(at::equal(chunked_map(body, input, {}, {.chunk_tokens = 16}), output));
  CHECK(at::equal(at::rand({4}), after_forward));
  CHECK(at::equal(at::rand({4}), after_backward));
}

TEST_CASE("chunked_map: the backward pass casts as the forward did, and frozen casts are not remembered") {
  at::manual_seed(4);
  const at::Tensor input = leaf({12, 8}, at::kFloat), weight = leaf({8, 8}, at::kFloat);
  std::vector<at::ScalarType> dtypes;
  const TokenwiseBody body = [&](const at::Tensor& tokens) {
    const at::Tensor output = at::linear(tokens, weight);
    dtypes.push_back(output.scalar_type());
    return output;
  };
  at::autocast::set_autocast_enabled(at::kCPU, true);
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  const at::Tensor output = chunked_map(body, input, {weight}, {.chunk_tokens = 5});
  const at::Tensor recorded = at::linear(input, weight);
  at::autocast::set_autocast_enabled(at::kCPU, false);
  CHECK(torch::autograd::grad({recorded.sum()}, {weight})[0].defined());
  const auto found = torch::autograd::grad({output.sum()}, {input, weight});
  CHECK((dtypes == std::vector<at::ScalarType>(6, at::kBFloat16)));
  CHECK((found[1].scalar_type() == at::kFloat));
  CHECK_FALSE(at::autocast::is_autocast_enabled(at::kCPU));
  CHECK(at::autocast::is_autocast_cache_enabled());
  at::autocast::clear_cache();
}

TEST_CASE("chunked_map: errors of the body and of the caller arrive") {
  const at::Tensor input = leaf({6, 2});
  const auto map = [&](const TokenwiseBody& body, int64_t chunk, int64_t dim = -2) {
    return chunked_map(body, input, {}, {.chunk_tokens = chunk, .dim = dim});
  };
  const TokenwiseBody same = [](const at::Tensor& tokens) { return tokens * 1; };
  CHECK_THROWS_AS(map(same, 0), std::invalid_argument);
  CHECK_THROWS_AS(map(same, 2, 2), std::invalid_argument);
  CHECK_THROWS_AS(map(same, 2, -3), std::invalid_argument);
  CHECK_THROWS_AS(map([](const at::Tensor& tokens) { return tokens.sum(); }, 2), std::invalid_argument);
  CHECK_THROWS_AS(map([](const at::Tensor& tokens) { return tokens.slice(0, 1); }, 2), std::invalid_argument);

  int calls = 0;
  const TokenwiseBody failing = [&](const at::Tensor& tokens) {
    if (++calls == 5) throw std::out_of_range("the fifth");
    return tokens * 2;
  };
  const at::Tensor output = map(failing, 2);
  CHECK_THROWS_AS(torch::autograd::grad({output.sum()}, {input}), std::out_of_range);
  const at::Tensor other = map(same, 2);
  CHECK_THROWS_WITH_AS(torch::autograd::grad({other.sum()}, {input}, {}, true, /*create_graph=*/true),
                       doctest::Contains("create_graph"), std::invalid_argument);
}

TEST_CASE("gated_mlp, two_layer_mlp: formulas, biases and chunks") {
  at::manual_seed(5);
  const at::Tensor input = leaf({2, 7, 4});
  for (const bool biased : {false, true}) {
    const auto projection = [&](int64_t to, int64_t from) {
      return Projection{leaf({to, from}), biased ? std::optional(leaf({to})) : std::nullopt};
    };
    const Projection gate = projection(6, 4), up = projection(6, 4), down = projection(4, 6);
    const auto apply = [](const at::Tensor& tokens, const Projection& by) {
      const at::Tensor product = tokens.matmul(by.weight.values().t());
      return by.bias ? product + *by.bias : product;
    };
    std::vector<at::Tensor> inputs{input, up.weight.values(), down.weight.values()};
    if (biased) inputs.insert(inputs.end(), {*up.bias, *down.bias});
    const std::vector<std::pair<const char*, std::function<at::Tensor(const at::Tensor&)>>> activations{
        {"silu", [](const at::Tensor& x) { return x * at::sigmoid(x); }},
        {"gelu", [](const at::Tensor& x) { return x * (at::erf(x * std::sqrt(0.5)) + 1) * 0.5; }},
        {"gelu_tanh",
         [](const at::Tensor& x) {
           return x * (at::tanh((x + x.pow(3) * 0.044715) * std::sqrt(2 / 3.14159265358979323846)) + 1) * 0.5;
         }},
        {"relu", [](const at::Tensor& x) { return x.clamp_min(0); }}};
    for (const auto& [name, activation] : activations) {
      for (const int64_t chunk : {0, 3, 7}) {
        CAPTURE(name);
        CAPTURE(chunk);
        const auto compare = [&](const at::Tensor& output, const at::Tensor& plain, std::vector<at::Tensor> all) {
          const auto found = with_gradients(output, all), expected = with_gradients(plain, all);
          for (size_t index = 0; index < found.size(); ++index) CHECK(distance(found[index], expected[index]) < 1e-12);
        };
        std::vector<at::Tensor> gated_inputs = inputs;
        gated_inputs.push_back(gate.weight.values());
        compare(gated_mlp(input, gate, up, down, parse_activation(name), chunk),
                apply(activation(apply(input, gate)) * apply(input, up), down), gated_inputs);
        compare(two_layer_mlp(input, up, down, parse_activation(name), chunk),
                apply(activation(apply(input, up)), down), inputs);
      }
    }
  }
  CHECK_THROWS_AS(parse_activation("swish"), std::invalid_argument);
}

}  // namespace chunked_mlp_test
