#include <roundpipe/models/decoder.h>

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <doctest/doctest.h>

namespace roundpipe::models {
namespace lora_test {

TEST_CASE("lora: an adapter adds its product, in its own dtype") {
  const at::Tensor input = at::linspace(-1, 1, 6).reshape({2, 3});
  ops::Projection base{at::linspace(0, 1, 12).reshape({4, 3}), at::ones({4})};
  CHECK(ops::project(input, base).equal(at::linear(input, base.weight.values(), base.bias)));
  const at::Tensor down = at::linspace(1, 2, 6).reshape({2, 3}), up = at::linspace(-1, 1, 8).reshape({4, 2});
  const at::Tensor expected = at::linear(input, base.weight.values() + at::matmul(up, down) * 0.5, base.bias);
  base.adapter = ops::LowRankAdapter{.down = down, .up = up, .scaling = 0.5};
  CHECK(at::allclose(ops::project(input, base), expected, 1e-5, 1e-6));
  base.adapter->up_bias = at::full({4}, 2.0);
  CHECK(at::allclose(ops::project(input, base), expected + 1, 1e-5, 1e-6));
  CHECK(ops::parameters_of(base).size() == 5);
  base.adapter->dropout = 1;  // of everything
  CHECK(at::allclose(ops::project(input, base), expected + 1, 1e-5, 1e-6));
  base.adapter->training = true;
  CHECK(at::allclose(ops::project(input, base), at::linear(input, base.weight.values(), base.bias) + 1, 1e-5, 1e-6));
  const ops::Projection small{base.weight.values().to(at::kBFloat16), std::nullopt, base.adapter};
  CHECK((ops::project(input.to(at::kBFloat16), small).scalar_type() == at::kBFloat16));
}

TEST_CASE("lora: adapters are found by PEFT's names") {
  std::vector<std::string> names = {"input_layernorm.weight",
                                    "post_attention_layernorm.weight",
                                    "self_attn.q_proj.weight",
                                    "self_attn.k_proj.weight",
                                    "self_attn.v_proj.base_layer.weight",
                                    "self_attn.v_proj.lora_A.mine.weight",
                                    "self_attn.v_proj.lora_B.mine.weight",
                                    "self_attn.v_proj.lora_B.mine.bias",
                                    "self_attn.o_proj.weight",
                                    "mlp.gate_proj.weight",
                                    "mlp.up_proj.weight",
                                    "mlp.down_proj.weight"};
  const auto find = [&] {
    std::vector<at::Tensor> tensors;
    for (size_t i = 0; i < names.size(); ++i) tensors.push_back(at::full({1}, static_cast<double>(i)));
    return find_decoder_weights(names, tensors);
  };
  DecoderWeights found = find();
  CHECK(found.value.weight.values().item<double>() == 4);
  REQUIRE(found.value.adapter.has_value());
  CHECK(found.value.adapter->down.item<double>() == 5);
  CHECK(found.value.adapter->up.item<double>() == 6);
  CHECK(found.value.adapter->up_bias->item<double>() == 7);
  CHECK_FALSE(found.up.adapter.has_value());
  LoraNumbersOfLayer numbers;
  numbers[2] = {.scaling = 3, .dropout = 0.25, .training = true};
  numbers[5].scaling = 7;
  set_lora(found, numbers);
  CHECK(found.value.adapter->scaling == 3);
  CHECK(found.value.adapter->dropout == 0.25);
  CHECK(found.value.adapter->training);
  // A second adapter of one projection is not taken for the first.
  names.push_back("self_attn.v_proj.lora_A.other.weight");
  CHECK_THROWS_WITH_AS(find(),
                       "[decoder] there is a weight 'self_attn.v_proj.lora_A.other.weight', which such a layer has not",
                       std::invalid_argument);
}

}  // namespace lora_test
}  // namespace roundpipe::models
