#include <roundpipe/models/decoder_layer.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

namespace roundpipe::models {
namespace decoder_layer_test {

using runtime::Layer;
using runtime::LayerContext;
using runtime::LayerShell;
using runtime::Values;

const std::vector<std::string> kNames = {
    "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",        "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",    "mlp.up_proj.weight",      "mlp.down_proj.weight",           "input_layernorm.weight",
    "self_attn.q_proj.bias",   "mlp.down_proj.bias",      "post_attention_layernorm.weight"};

// Width 8, four heads of 2 with two key heads, inner width 6.
std::vector<at::Tensor> weights() {
  const auto options = at::TensorOptions(at::kFloat);
  at::Generator generator = at::detail::createCPUGenerator(3);
  std::vector<at::Tensor> made;
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{8, 8}, {4, 8}, {4, 8}, {8, 8}, {6, 8}, {6, 8}, {8, 6}, {8}, {8}, {8}, {8}}) {
    made.push_back(at::randn(shape, generator, options));
  }
  return made;
}

DecoderConfig config() {
  DecoderConfig made;
  made.head_dim = 2;
  made.scaling = 0.5;
  made.input_norm_eps = made.post_norm_eps = 1e-5;
  return made;
}

// The general form: it counts, and returns its first input plus one.
struct Counts {
  int forwards = 0;
  std::vector<std::shared_ptr<const void>> refreshed;
  std::shared_ptr<const void> attributes = std::make_shared<const int>(1);
};

class GeneralShell final : public LayerShell {
 public:
  explicit GeneralShell(Counts& counts) : counts_(counts) { parameters = weights(); }
  Values forward(const Values& inputs, const LayerContext& /*context*/) override {
    ++counts_.forwards;
    return {{inputs.tensors.front() + 1}, inputs.structure};
  }
  void refresh(const std::shared_ptr<const void>& attributes) override { counts_.refreshed.push_back(attributes); }

 private:
  Counts& counts_;
};

class General final : public Layer {
 public:
  explicit General(Counts& counts) : counts_(counts) {}
  std::string name() const override { return "general"; }
  std::vector<memory::NamedTensor> parameters() const override {
    std::vector<memory::NamedTensor> named;
    const std::vector<at::Tensor> tensors = weights();
    for (size_t i = 0; i < tensors.size(); ++i) named.push_back({kNames[i], tensors[i]});
    return named;
  }
  std::vector<memory::NamedTensor> buffers() const override { return {}; }
  uint64_t mode_key() const override { return 7; }
  std::shared_ptr<const void> attributes() const override { return counts_.attributes; }
  std::unique_ptr<LayerShell> make_shell(c10::Device /*device*/) override {
    return std::make_unique<GeneralShell>(counts_);
  }

 private:
  Counts& counts_;
};

struct Fixture {
  Counts counts;
  std::shared_ptr<const DecoderConfig> current = std::make_shared<const DecoderConfig>(config());
  std::shared_ptr<const int> structure = std::make_shared<const int>(2);
  int after = 3;  // stands for what a structure owns
  DecoderCall call;
  bool is_native = true;
  std::unique_ptr<Layer> layer;
  std::unique_ptr<LayerShell> shell;
  Values inputs;

  Fixture() {
    call.hidden = 2;
    call.cos = 0;
    call.sin = 1;
    call.outputs = {1, DecoderCall::kResult, 0};
    call.inputs = 3;
    call.structure = &after;
    NativeLayerParts parts;
    parts.general = std::make_unique<General>(counts);
    parts.config = [this] { return current; };
    parts.code = [this](const LayerShell& general) {
      return make_decoder_code(kNames, general.parameters, [this](const Values& given) {
        CHECK(given.structure == structure);
        return is_native ? &call : nullptr;
      });
    };
    layer = make_native_layer(std::move(parts));
    shell = layer->make_shell(at::kCPU);
    shell->refresh(layer->attributes());
    const at::Tensor angles = at::arange(10, at::kFloat).reshape({1, 5, 2});
    inputs = {{angles.cos(), angles.sin(), at::linspace(-1, 1, 80).reshape({2, 5, 8})}, structure};
  }

  at::Tensor expected() const {
    DecoderInputs given;
    given.hidden = inputs.tensors[2];
    given.cos = inputs.tensors[0];
    given.sin = inputs.tensors[1];
    return decode(*current, find_decoder_weights(kNames, weights()), given);
  }
};

TEST_CASE_FIXTURE(Fixture, "decoder layer: a native call hands on what the call says") {
  const Values outputs = shell->forward(inputs, {});
  REQUIRE(outputs.tensors.size() == 3);
  CHECK(outputs.tensors[0].is_same(inputs.tensors[1]));
  CHECK(outputs.tensors[1].equal(expected()));
  CHECK(outputs.tensors[2].is_same(inputs.tensors[0]));
  CHECK(counts.forwards == 0);
  CHECK(outputs.structure.get() == &after);
  // It keeps what it is part of.
  CHECK(structure.use_count() == 3);
  CHECK(layer->hold() == nullptr);
  CHECK(layer->mode_key() == 7);
}

TEST_CASE_FIXTURE(Fixture, "decoder layer: documents of the call are those of a table beside positions") {
  call.attention = Attention::kPacked;
  call.documents = std::make_shared<ops::Documents>(2, std::vector<std::vector<int64_t>>{{2, 3}, {4, -1}});
  const at::Tensor found = shell->forward(inputs, {}).tensors[1];
  CHECK_FALSE(found.equal(expected()));
  call.documents.reset();
  call.mask = 3;
  call.positions = 4;
  call.inputs = 5;
  inputs.tensors.push_back(at::tensor({2, 5, 0, 2, 4, -1}).reshape({2, 3}));
  inputs.tensors.push_back(at::tensor({0, 1, 0, 1, 2, 5, 6, 7, 8, 9}).reshape({2, 5}));
  CHECK(shell->forward(inputs, {}).tensors[1].equal(found));
}

TEST_CASE_FIXTURE(Fixture, "decoder layer: outputs that nobody reads have the same graph") {
  const auto gradients = [&](bool are_read) {
    at::Tensor& hidden = inputs.tensors[2];
    hidden = hidden.detach().requires_grad_(true);
    std::vector<at::Tensor> wanted = shell->parameters;
    for (at::Tensor& parameter : wanted) parameter.requires_grad_(true);
    wanted.push_back(hidden);
    LayerContext context;
    context.outputs_are_read = are_read;
    const at::Tensor result = shell->forward(inputs, context).tensors[1];
    CHECK((result.sizes() == hidden.sizes()));
    return torch::autograd::grad({result}, wanted, {at::ones_like(result)});
  };
  const std::vector<at::Tensor> expected = gradients(true), found = gradients(false);
  for (size_t i = 0; i < expected.size(); ++i) CHECK(found[i].equal(expected[i]));
}

TEST_CASE_FIXTURE(Fixture, "decoder layer: without a call or a configuration, the general form runs") {
  is_native = false;
  CHECK(shell->forward(inputs, {}).tensors.front().equal(inputs.tensors.front() + 1));
  CHECK(counts.forwards == 1);
  is_native = true;
  current = nullptr;
  shell->refresh(layer->attributes());
  shell->forward(inputs, {});
  CHECK(counts.forwards == 2);
}

TEST_CASE_FIXTURE(Fixture, "decoder layer: with other inputs than the call has, the general form runs") {
  inputs.tensors.push_back(at::ones({1}));
  CHECK(shell->forward(inputs, {}).tensors.front().equal(inputs.tensors.front() + 1));
  CHECK(counts.forwards == 1);
}

TEST_CASE_FIXTURE(Fixture, "decoder layer: attributes are new if either form's are") {
  const std::shared_ptr<const void> first = layer->attributes();
  CHECK(layer->attributes() == first);
  REQUIRE(counts.refreshed.size() == 1);
  DecoderConfig changed = config();
  changed.scaling = 2;
  current = std::make_shared<const DecoderConfig>(changed);
  const std::shared_ptr<const void> second = layer->attributes();
  CHECK(second != first);
  const at::Tensor before = shell->forward(inputs, {}).tensors[1];
  shell->refresh(second);
  CHECK(counts.refreshed.size() == 1);  // nothing has changed for the general form
  CHECK(shell->forward(inputs, {}).tensors[1].equal(expected()));
  CHECK_FALSE(shell->forward(inputs, {}).tensors[1].equal(before));
  counts.attributes = std::make_shared<const int>(1);
  shell->refresh(layer->attributes());
  REQUIRE(counts.refreshed.size() == 2);
  CHECK(counts.refreshed.back() == counts.attributes);
}

TEST_CASE_FIXTURE(Fixture, "decoder layer: the mask and the MLP's chunks of the call count") {
  inputs.tensors.push_back(at::ones({5, 5}, at::kBool).tril(-1).logical_or(at::eye(5, at::kBool)));
  call.mask = 3;
  call.inputs = 4;
  CHECK(at::allclose(shell->forward(inputs, {}).tensors[1], expected(), 1e-5, 1e-5));
  inputs.tensors.back() = at::eye(5, at::kBool);
  CHECK_FALSE(at::allclose(shell->forward(inputs, {}).tensors[1], expected(), 1e-5, 1e-5));
  inputs.tensors.back() = at::empty({0}, at::kBool);  // there is none
  CHECK(at::allclose(shell->forward(inputs, {}).tensors[1], expected(), 1e-5, 1e-5));
  call.mask.reset();
  call.mlp_chunk_tokens = 2;
  CHECK(at::allclose(shell->forward(inputs, {}).tensors[1], expected(), 1e-5, 1e-5));
}

TEST_CASE("decoder layer: eager and sdpa agree, also on a single token of grouped heads") {
  const DecoderWeights found = find_decoder_weights(kNames, weights());
  for (const int64_t tokens : {1, 4}) {
    DecoderInputs given;
    given.hidden = at::linspace(-1, 1, 2 * tokens * 8).reshape({2, tokens, 8});
    given.cos = at::full({1, tokens, 2}, 0.6);
    given.sin = at::full({1, tokens, 2}, 0.8);
    given.mask = at::zeros({1, 1, tokens, tokens});
    const at::Tensor by_sdpa = decode(config(), found, given);
    given.attention = Attention::kEager;
    CHECK(at::allclose(by_sdpa, decode(config(), found, given), 1e-4, 1e-5));
  }
}

}  // namespace decoder_layer_test
}  // namespace roundpipe::models
