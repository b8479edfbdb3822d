#include <roundpipe/language/layers.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <roundpipe/api/engine_layer.h>
#include <roundpipe/core/error.h>
#include <roundpipe/language/lora.h>
#include <roundpipe/language/rotary.h>
#include <roundpipe/models/masks.h>

namespace roundpipe::language {

using at::Tensor;
using models::Attention;

namespace {

const char* const kEmbedding = "model.embed_tokens";
const char* const kNorm = "model.norm";
const char* const kHead = "lm_head";

// Rows of more tokens than this run through an MLP in chunks of half as many.
constexpr int64_t kWholeMlpTokens = 16384;

std::string layer_name(int64_t index) { return "model.layers." + std::to_string(index); }

// The inputs and outputs of a linear layer of a decoder layer.
struct Widths {
  int64_t inputs, outputs;
  bool has_bias;
};

Widths widths_of(const Config& config, const std::string& module) {
  const int64_t query_width = config.heads * config.head_dim, key_width = config.key_heads * config.head_dim;
  if (module == "self_attn.q_proj") return {config.width, query_width, config.query_bias};
  if (module == "self_attn.o_proj") return {query_width, config.width, config.output_bias};
  if (module.starts_with("self_attn.")) return {config.width, key_width, config.query_bias};
  if (module == "mlp.down_proj") return {config.inner_width, config.width, config.mlp_bias};
  return {config.width, config.inner_width, config.mlp_bias};
}

std::vector<WeightShape> mixture_shapes(const ExpertsConfig& experts, int64_t width) {
  const int64_t count = experts.count, inner = experts.inner_width;
  if (!experts.clamped) {
    return {{"mlp.gate.weight", {count, width}},
            {"mlp.experts.gate_up_proj", {count, 2 * inner, width}},
            {"mlp.experts.down_proj", {count, width, inner}}};
  }
  return {{"mlp.router.weight", {count, width}},
          {"mlp.router.bias", {count}},
          {"mlp.experts.gate_up_proj", {count, width, 2 * inner}},
          {"mlp.experts.gate_up_proj_bias", {count, 2 * inner}},
          {"mlp.experts.down_proj", {count, inner, width}},
          {"mlp.experts.down_proj_bias", {count, width}}};
}

std::vector<WeightShape> decoder_shapes(const Config& config, int64_t index) {
  std::vector<WeightShape> shapes;
  for (const std::string& module : linear_modules(config, index)) {
    const Widths widths = widths_of(config, module);
    shapes.push_back({module + ".weight", {widths.outputs, widths.inputs}});
    if (widths.has_bias) shapes.push_back({module + ".bias", {widths.outputs}});
  }
  if (config.sparse.at(static_cast<size_t>(index)) != 0) {
    for (WeightShape& shape : mixture_shapes(*config.experts, config.width)) shapes.push_back(std::move(shape));
  }
  if (config.sinks) shapes.push_back({"self_attn.sinks", {config.heads}});
  if (config.query_norm) {
    shapes.push_back({"self_attn.q_norm.weight", {config.head_dim}});
    shapes.push_back({"self_attn.k_norm.weight", {config.head_dim}});
  }
  shapes.push_back({"input_layernorm.weight", {config.width}});
  shapes.push_back({"post_attention_layernorm.weight", {config.width}});
  return shapes;
}

// Of one layer, by the names in it.
std::vector<WeightShape> adapter_shapes_of(const Config& config, const LoraOptions& lora, int64_t index) {
  std::vector<WeightShape> shapes;
  for (const std::string& module : linear_modules(config, index)) {
    if (!has_adapter(lora, layer_name(index), module)) continue;
    const Widths widths = widths_of(config, module);
    shapes.push_back({module + ".lora_A.weight", {lora.rank, widths.inputs}});
    shapes.push_back({module + ".lora_B.weight", {widths.outputs, lora.rank}});
  }
  return shapes;
}

Layer embedding_layer(const Config& config, const Tensor& weight, Attention attention, Arithmetic arithmetic) {
  bool any_slides = false, any_full = false;
  for (const char slides : config.slides) (slides != 0 ? any_slides : any_full) = true;
  const std::optional<ExpertsConfig> balanced = config.router_loss_factor ? config.experts : std::nullopt;
  return layer({{"weight", weight}},
               [any_slides, any_full, attention, balanced, is_fast = arithmetic == Arithmetic::kFast,
                window = config.window, pad = config.pad_token.value_or(-1),
                rotary = Rotary(config)](const std::vector<Tensor>& own, const Tokens& tokens) {
                 const Tensor& ids = tokens.ids;
                 Hidden hidden;
                 hidden.values = at::embedding(own[0], ids, pad);
                 const c10::ScalarType dtype = hidden.values.scalar_type();
                 const models::TokenPlaces places{ids.size(0), ids.size(1), tokens.attention_mask, tokens.positions,
                                                  tokens.documents};
                 const auto mask_of = [&](std::optional<int64_t> seen) {
                   return models::make_mask(attention, places, ids.device(),
                                            {seen, dtype, is_fast && tokens.documents->padding_is_unread, is_fast})
                       .value_or(Tensor());
                 };
                 if (any_full) hidden.mask = mask_of(std::nullopt);
                 if (any_slides) hidden.window_mask = mask_of(window);
                 hidden.documents = hidden.window_documents = tokens.documents;
                 if (any_slides) {
                   hidden.window_documents =
                       std::make_shared<ops::Documents>(ops::with_window(*tokens.documents, window.value_or(0)));
                 }
                 Tensor positions = tokens.positions;
                 if (!positions.defined()) positions = at::arange(ids.size(1), ids.options()).unsqueeze(0);
                 std::tie(hidden.cos, hidden.sin) = rotary.cos_sin(positions, dtype);
                 hidden.labels = tokens.labels;
                 hidden.counted = tokens.counted;
                 hidden.chunk_logit_bytes = tokens.chunk_logit_bytes;
                 hidden.training = tokens.training;
                 if (balanced && tokens.labels.defined()) {
                   hidden.routers = no_routers(*balanced, ids.device());
                   hidden.attention_mask = tokens.attention_mask;
                 }
                 return hidden;
               })
      .named(kEmbedding);
}

Layer decoder_layer(const Config& config, int64_t index, NamedParameters parameters, const LayerOptions& options,
                    const std::optional<LoraOptions>& lora, models::Encodings encodings) {
  models::DecoderConfig decoder;
  decoder.head_dim = config.head_dim;
  decoder.scaling = std::pow(static_cast<double>(config.head_dim), -0.5);
  decoder.input_norm_eps = decoder.post_norm_eps = config.norm_eps;
  decoder.query_norm_eps = decoder.key_norm_eps = config.norm_eps;
  decoder.scales_norms_in_float = config.float_norms;
  decoder.attention_dropout = config.attention_dropout;
  decoder.activation = config.activation;
  decoder.arithmetic = options.arithmetic;
  if (lora) decoder.lora.fill({.scaling = lora->scaling(), .dropout = lora->dropout});
  if (config.experts) {
    decoder.moe.top_k = config.experts->top_k;
    decoder.moe.shares = config.experts->shares;
    decoder.moe.activation = config.activation;
    decoder.moe.clamped = config.experts->clamped;
  }
  std::vector<std::string> names;
  for (const auto& [name, tensor] : parameters) names.push_back(name);
  const bool slides = config.slides.at(static_cast<size_t>(index)) != 0;
  const bool sparse = config.sparse.at(static_cast<size_t>(index)) != 0;
  return layer(std::move(parameters),
               [given = decoder, names, slides, options, encodings = std::move(encodings),
                balanced = sparse ? config.experts : std::nullopt,
                attention = attention_of(config, options)](const std::vector<Tensor>& own, Hidden hidden) {
                 models::DecoderConfig decoder = given;
                 decoder.training = hidden.training;
                 for (models::LoraNumbers& numbers : decoder.lora) numbers.training = hidden.training;
                 const bool collects = balanced && hidden.routers.chosen.defined();
                 models::DecoderInputs inputs;
                 inputs.hidden = hidden.values;
                 inputs.cos = hidden.cos;
                 inputs.sin = hidden.sin;
                 const Tensor& mask = slides ? hidden.window_mask : hidden.mask;
                 if (mask.defined()) inputs.mask = mask;
                 inputs.documents = slides ? hidden.window_documents : hidden.documents;
                 inputs.attention = attention;
                 inputs.experts = options.experts;
                 inputs.result_is_read = outputs_are_read();
                 inputs.mlp_chunk_tokens = options.mlp_chunk_tokens;
                 if (options.mlp_chunk_tokens == 0 && hidden.values.size(1) > kWholeMlpTokens) {
                   inputs.mlp_chunk_tokens = kWholeMlpTokens / 2;
                 }
                 if (collects) inputs.mlp_chunk_tokens = 0;
                 models::DecoderWeights weights = models::find_decoder_weights(names, own, encodings);
                 models::set_lora(weights, decoder.lora);
                 Tensor logits;
                 hidden.values = models::decode(decoder, weights, inputs, collects ? &logits : nullptr);
                 if (collects) hidden.routers = with_router(hidden.routers, *balanced, logits, hidden.attention_mask);
                 return hidden;
               })
      .named(layer_name(index));
}

Layer norm_layer(const Config& config, const Tensor& weight, const LayerOptions& options) {
  return layer({{"weight", weight}},
               [eps = config.norm_eps, in_float = config.float_norms, arithmetic = options.arithmetic](
                   const std::vector<Tensor>& own, Hidden hidden) {
                 hidden.values = models::rms_norm(hidden.values, own[0], eps, in_float, arithmetic);
                 return hidden;
               })
      .named(kNorm);
}

Layer head_layer(const Config& config, const Tensor& weight, const LayerOptions& options) {
  return layer({{"weight", weight}},
               [chunk_tokens = options.loss_chunk_tokens, arithmetic = options.arithmetic,
                factor = config.router_loss_factor,
                routers = std::ranges::count(config.sparse, 1)](const std::vector<Tensor>& own, const Hidden& hidden) {
                 if (!hidden.labels.defined()) return at::linear(hidden.values, own[0]);
                 const models::TokenLossOptions how{false, chunk_tokens, hidden.chunk_logit_bytes, arithmetic};
                 const Tensor loss = models::token_loss(hidden.values, {own[0]}, hidden.labels, how) / hidden.counted;
                 if (!factor) return loss;
                 const Tensor labels = models::predicted_labels(hidden.labels, hidden.values.device());
                 const Tensor balance = router_loss(hidden.routers, routers, labels.numel(), hidden.attention_mask);
                 const Tensor share = labels.ne(kIgnoredLabel).sum().to(at::kFloat) / hidden.counted;
                 return loss + balance * *factor * share;
               })
      .named(kHead);
}

}  // namespace

Attention attention_of(const Config& config, const LayerOptions& options) {
  if (!options.attention) return config.sinks ? Attention::kEager : Attention::kSdpa;
  if (config.sinks && *options.attention == Attention::kSdpa) {
    throw std::invalid_argument(concat("[language model] the attention is sdpa, expected eager or packed for ",
                                       config.model_type, ", whose sinks torch's attention does not take"));
  }
  return *options.attention;
}

std::vector<WeightShape> weight_shapes(const Config& config) {
  std::vector<WeightShape> shapes = {{concat(kEmbedding, ".weight"), {config.vocabulary, config.width}}};
  for (int64_t i = 0; i < config.layers; ++i) {
    for (WeightShape& shape : decoder_shapes(config, i)) {
      shapes.push_back({layer_name(i) + "." + shape.name, std::move(shape.shape)});
    }
  }
  shapes.push_back({concat(kNorm, ".weight"), {config.width}});
  if (!config.tied) shapes.push_back({concat(kHead, ".weight"), {config.vocabulary, config.width}});
  return shapes;
}

std::vector<WeightShape> adapter_shapes(const Config& config, const LoraOptions& lora) {
  std::vector<WeightShape> shapes;
  for (int64_t i = 0; i < config.layers; ++i) {
    for (WeightShape& shape : adapter_shapes_of(config, lora, i)) {
      shapes.push_back({layer_name(i) + "." + shape.name, std::move(shape.shape)});
    }
  }
  return shapes;
}

std::vector<Layer> make_layers(const Config& config, c10::ScalarType dtype, const LayerOptions& options,
                               const std::optional<LoraOptions>& lora, const models::Encodings& encodings) {
  const auto weight = [&](const std::vector<int64_t>& shape, bool is_norm = false) {
    const bool stays_float = is_norm && config.float_norms && dtype == at::kHalf;
    return at::empty(shape, at::TensorOptions(stays_float ? at::kFloat : dtype)).set_requires_grad(!lora);
  };
  const Tensor embedding = weight({config.vocabulary, config.width});
  std::vector<Layer> layers = {embedding_layer(config, embedding, attention_of(config, options), options.arithmetic)};
  for (int64_t i = 0; i < config.layers; ++i) {
    NamedParameters parameters;
    models::Encodings encoded;
    for (const auto& [name, shape] : decoder_shapes(config, i)) {
      const auto encoding = encodings.find(layer_name(i) + "." + name);
      if (encoding == encodings.end()) {
        parameters.emplace_back(name, weight(shape, name.ends_with("norm.weight")));
        continue;
      }
      encoded.emplace(name, encoding->second);
      for (const quantise::Part& part : encoding->second.parts(shape))
        parameters.emplace_back(name + part.suffix, at::empty(part.sizes, at::TensorOptions(part.dtype)));
    }
    if (lora) {
      for (const auto& [name, shape] : adapter_shapes_of(config, *lora, i)) {
        parameters.emplace_back(name, at::empty(shape, at::TensorOptions(at::kFloat)).set_requires_grad(true));
      }
    }
    layers.push_back(decoder_layer(config, i, std::move(parameters), options, lora, std::move(encoded)));
  }
  layers.push_back(norm_layer(config, weight({config.width}, true), options));
  layers.push_back(head_layer(config, config.tied ? embedding : weight({config.vocabulary, config.width}), options));
  return layers;
}

}  // namespace roundpipe::language
