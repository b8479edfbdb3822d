#include <roundpipe/models/moe.h>

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <doctest/doctest.h>

#include <roundpipe/models/decoder.h>

namespace roundpipe::models {
namespace moe_test {

constexpr int64_t kExperts = 5, kWidth = 8, kInner = 4;

MoeWeights weights() {
  at::Generator generator = at::detail::createCPUGenerator(3);
  const auto drawn = [&](at::IntArrayRef sizes) { return at::randn(sizes, generator, at::kFloat); };
  return {{drawn({kExperts, kWidth}), std::nullopt},
          drawn({kExperts, 2 * kInner, kWidth}),
          drawn({kExperts, kWidth, kInner})};
}

// Token by token, expert by expert.
at::Tensor reference(const MoeConfig& config, const MoeWeights& weights, const at::Tensor& hidden) {
  const at::Tensor tokens = hidden.reshape({-1, kWidth});
  at::Tensor result = at::zeros_like(tokens);
  for (int64_t token = 0; token < tokens.size(0); ++token) {
    const at::Tensor state = tokens[token];
    const at::Tensor shares = at::softmax(at::mv(weights.router.weight.values(), state), 0);
    const auto [values, indices] = at::topk(shares, config.top_k);
    for (int64_t rank = 0; rank < config.top_k; ++rank) {
      const auto expert = indices[rank].item<int64_t>();
      const at::Tensor gate_up = at::mv(weights.gate_up.values()[expert], state);
      const at::Tensor inner = ops::activate(gate_up.slice(0, 0, kInner), config.activation) * gate_up.slice(0, kInner);
      const at::Tensor share = config.shares == Shares::kNormalized ? values[rank] / values.sum() : values[rank];
      result[token].add_(at::mv(weights.down.values()[expert], inner) * share);
    }
  }
  return result.reshape(hidden.sizes());
}

TEST_CASE("moe: every way to compute is the sum over each token's experts") {
  const at::Tensor hidden = at::linspace(-2, 2, 2 * 3 * kWidth).reshape({2, 3, kWidth}).sin();
  for (const int64_t top_k : {int64_t{1}, int64_t{2}, kExperts}) {
    for (const Shares shares : {Shares::kSoftmaxOfAll, Shares::kNormalized}) {
      const MoeConfig config{top_k, shares, ops::Activation::kGelu};
      const at::Tensor expected = reference(config, weights(), hidden);
      for (const char* name : {"eager", "grouped_mm", "batched_mm"}) {
        CAPTURE(name);
        at::Tensor logits;
        const at::Tensor found = mixture_of_experts(config, weights(), parse_experts(name), hidden, &logits);
        CHECK(at::allclose(found, expected, 1e-4, 1e-5));
        CHECK(at::allclose(logits, at::linear(hidden.reshape({-1, kWidth}), weights().router.weight.values())));
      }
    }
  }
}

TEST_CASE("moe: GPT-OSS's gate, biases and shares") {
  MoeWeights made = weights();
  made.router.bias = at::linspace(-1, 1, kExperts);
  made.gate_up_bias = at::linspace(-1, 1, kExperts * 2 * kInner).reshape({kExperts, 2 * kInner});
  made.down_bias = at::linspace(1, -1, kExperts * kWidth).reshape({kExperts, kWidth});
  made.gate_up = made.gate_up.values().transpose(1, 2).contiguous();
  made.down = made.down.values().transpose(1, 2).contiguous();
  MoeConfig config{2, Shares::kSoftmaxOfChosen};
  config.clamped = {1.5, 0.75};
  const at::Tensor tokens = at::linspace(-2, 2, 3 * kWidth).reshape({3, kWidth}).sin();
  at::Tensor expected = at::zeros_like(tokens);
  for (int64_t token = 0; token < tokens.size(0); ++token) {
    const at::Tensor state = tokens[token];
    const auto [scores, indices] =
        at::topk(at::mv(made.router.weight.values(), state) + *made.router.bias, config.top_k);
    const at::Tensor shares = at::softmax(scores, 0);
    for (int64_t rank = 0; rank < config.top_k; ++rank) {
      const auto expert = indices[rank].item<int64_t>();
      const at::Tensor pairs =
          (at::mv(made.gate_up.values()[expert].t(), state) + made.gate_up_bias[expert]).reshape({kInner, 2});
      const at::Tensor gate = pairs.select(1, 0).clamp_max(0.75), up = pairs.select(1, 1).clamp(-0.75, 0.75);
      const at::Tensor inner = (up + 1) * gate * at::sigmoid(gate * 1.5);
      expected[token].add_((at::mv(made.down.values()[expert].t(), inner) + made.down_bias[expert]) * shares[rank]);
    }
  }
  for (const char* name : {"eager", "grouped_mm", "batched_mm"}) {
    CAPTURE(name);
    const at::Tensor found = mixture_of_experts(config, made, parse_experts(name), tokens.unsqueeze(0));
    CHECK(at::allclose(found.squeeze(0), expected, 1e-4, 1e-5));
  }
}

TEST_CASE("moe: one token leaves experts without any") {
  const at::Tensor hidden = at::ones({1, 1, kWidth});
  const MoeConfig config{2};
  for (const char* name : {"eager", "grouped_mm", "batched_mm"}) {
    CAPTURE(name);
    const at::Tensor found = mixture_of_experts(config, weights(), parse_experts(name), hidden);
    CHECK(at::allclose(found, reference(config, weights(), hidden), 1e-4, 1e-5));
  }
}

TEST_CASE("moe: another way to compute is refused by its name") {
  CHECK_THROWS_WITH_AS(parse_experts("sonic"),
                       "[moe] the experts are 'sonic', expected one of eager, grouped_mm and batched_mm",
                       std::invalid_argument);
}

TEST_CASE("moe: other shares are refused by their name") {
  CHECK_THROWS_WITH_AS(
      parse_shares("sigmoid"),
      "[moe] the shares are 'sigmoid', expected one of softmax_of_all, normalized and softmax_of_chosen",
      std::invalid_argument);
}

TEST_CASE("moe: a decoder layer's weights are those of an MLP or of experts") {
  const at::Tensor any = at::ones({1});
  std::vector<std::string> names = {
      "input_layernorm.weight",  "post_attention_layernorm.weight", "self_attn.q_proj.weight",
      "self_attn.k_proj.weight", "self_attn.v_proj.weight",         "self_attn.o_proj.weight",
      "mlp.gate.weight",         "mlp.experts.gate_up_proj",        "mlp.experts.down_proj"};
  const DecoderWeights found = find_decoder_weights(names, std::vector<at::Tensor>(names.size(), any));
  REQUIRE(found.moe);
  CHECK(found.moe->router.weight.defined());
  names.pop_back();
  CHECK_THROWS_WITH_AS(find_decoder_weights(names, std::vector<at::Tensor>(names.size(), any)),
                       "[decoder] 'mlp.experts.down_proj' is missing, expected a weight with this name",
                       std::invalid_argument);
  names.push_back("mlp.experts.down_proj");
  names.push_back("mlp.up_proj.weight");
  CHECK_THROWS_AS(find_decoder_weights(names, std::vector<at::Tensor>(names.size(), any)), std::invalid_argument);
}

}  // namespace moe_test
}  // namespace roundpipe::models
