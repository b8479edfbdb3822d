#include <roundpipe/models/masks.h>

#include <limits>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <doctest/doctest.h>

namespace roundpipe::models {
namespace masks_test {

TokenPlaces places(const at::Tensor& attention_mask, const at::Tensor& positions = {}) {
  TokenPlaces made{2, 4, attention_mask, positions};
  made.documents = std::make_shared<ops::Documents>(ops::find_documents(attention_mask, positions, 2, 4));
  return made;
}

at::Tensor kept(const std::vector<int>& numbers) { return at::tensor(numbers).reshape({2, 4}); }

std::optional<at::Tensor> sdpa(const TokenPlaces& given, MaskOptions options = {}) {
  return make_mask(Attention::kSdpa, given, at::kCPU, options);
}

const at::Tensor causal() { return at::ones({4, 4}, at::kBool).tril(); }

TEST_CASE("masks: torch's attention needs none for whole rows") {
  CHECK_FALSE(sdpa(places({})));
  CHECK_FALSE(sdpa(places(at::ones({2, 4}))));
  CHECK_FALSE(sdpa(places({}, at::arange(4).unsqueeze(0))));
  CHECK_FALSE(sdpa(places({}), {.window = 5}));
}

TEST_CASE("masks: what tokens see") {
  CHECK(sdpa(places({}), {.window = 2})->equal((causal() & causal().triu(-1)).expand({2, 1, 4, 4})));
  const at::Tensor padded = *sdpa(places(kept({0, 1, 1, 1, 1, 1, 0, 0})));
  CHECK(padded[0][0].equal(causal() & kept({0, 1, 1, 1, 0, 0, 0, 0})[0].to(at::kBool)));
  CHECK(padded[1][0].equal(causal() & kept({1, 1, 0, 0, 0, 0, 0, 0})[0].to(at::kBool)));
  const at::Tensor apart = *sdpa(places({}, at::tensor({0, 1, 0, 1}).unsqueeze(0)));
  CHECK(apart.equal(at::block_diag({causal().slice(0, 0, 2).slice(1, 0, 2), causal().slice(0, 0, 2).slice(1, 0, 2)})
                        .expand({2, 1, 4, 4})));
  // With an attention mask, positions do not count, as in transformers.
  CHECK_FALSE(sdpa(places(at::ones({2, 4}), at::tensor({0, 1, 0, 1}).unsqueeze(0))));
}

TEST_CASE("masks: eager attention always has one, and packed attention never") {
  const at::Tensor added = *make_mask(Attention::kEager, places({}), at::kCPU, {.dtype = at::kDouble});
  CHECK((added.scalar_type() == at::kDouble));
  CHECK(added.eq(0).equal(causal().expand({2, 1, 4, 4})));
  CHECK(added.min().item<double>() == std::numeric_limits<float>::lowest());
  CHECK_FALSE(make_mask(Attention::kPacked, places(kept({0, 1, 1, 1, 1, 1, 0, 0})), at::kCPU, {}));
}

TEST_CASE("masks: whether one is needed is known without the values on the device") {
  // Tensors without data throw when they are read.
  const auto needs_one = [](TokenPlaces given, bool padding_may_attend) {
    for (at::Tensor* const tensor : {&given.attention_mask, &given.positions}) {
      if (tensor->defined()) *tensor = tensor->to(at::kMeta);
    }
    return make_mask(Attention::kSdpa, given, at::kMeta, {.padding_may_attend = padding_may_attend}).has_value();
  };
  CHECK_FALSE(needs_one(places({}), false));
  CHECK_FALSE(needs_one(places(at::ones({2, 4})), false));
  CHECK_FALSE(needs_one(places({}, at::arange(4).unsqueeze(0)), false));
  CHECK_FALSE(needs_one(places(kept({1, 1, 1, 0, 1, 1, 1, 1})), true));
}

TEST_CASE("masks: padding behind the tokens may attend, and then needs none") {
  const MaskOptions may{.padding_may_attend = true};
  const TokenPlaces right = places(kept({1, 1, 1, 0, 1, 1, 1, 1}));
  CHECK(sdpa(right));
  CHECK_FALSE(sdpa(right, may));
  CHECK(sdpa(places(kept({0, 1, 1, 1, 1, 1, 1, 1})), may));
  CHECK(sdpa(places(kept({1, 0, 1, 1, 1, 1, 1, 1})), may));
  CHECK(sdpa(places({}, at::tensor({0, 1, 0, 1}).unsqueeze(0)), may));
  CHECK(sdpa(right, {.window = 2, .padding_may_attend = true}));
}

TEST_CASE("masks: tokens before padding get the same if it may attend") {
  const TokenPlaces right = places(kept({1, 1, 1, 0, 1, 1, 0, 0}));
  at::Generator generator = at::detail::createCPUGenerator(2);
  const at::Tensor states = at::randn({2, 1, 4, 8}, generator, at::kDouble);
  const at::Tensor masked = at::scaled_dot_product_attention(states, states, states, sdpa(right));
  const at::Tensor plain = at::scaled_dot_product_attention(states, states, states, std::nullopt, 0, true);
  const at::Tensor tokens = right.attention_mask.to(at::kBool).unsqueeze(1).unsqueeze(-1);
  CHECK(at::allclose(masked * tokens, plain * tokens, 1e-12, 1e-12));
  CHECK_FALSE(at::allclose(masked, plain, 1e-12, 1e-12));
}

}  // namespace masks_test
}  // namespace roundpipe::models
