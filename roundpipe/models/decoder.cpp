#include <roundpipe/models/decoder.h>

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <roundpipe/core/error.h>
#include <roundpipe/kernels/kernels.h>
#include <roundpipe/ops/packed_attention.h>

namespace roundpipe::models {

using at::Tensor;

namespace {

Tensor rotate_half(const Tensor& states) {
  const int64_t half = states.size(-1) / 2;
  const Tensor first = states.slice(-1, 0, half);
  const Tensor second = states.slice(-1, half);
  return at::cat({-second, first}, -1);
}

// By a table of half the width.
Tensor rotated_halves(const Tensor& states, const Tensor& cos, const Tensor& sin) {
  const std::vector<Tensor> halves = states.chunk(2, -1);
  const Tensor first_along = halves[0] * cos;
  const Tensor first_across = halves[1] * sin;
  const Tensor first = first_along - first_across;
  const Tensor second_along = halves[1] * cos;
  const Tensor second_across = halves[0] * sin;
  const Tensor second = second_along + second_across;
  return at::cat({first, second}, -1);
}

Tensor rotated(const Tensor& states, const Tensor& cos, const Tensor& sin) {
  if (2 * cos.size(-1) == states.size(-1)) return rotated_halves(states, cos, sin);
  // One statement for each operator: C++ leaves the order of a sum's sides open, and autograd adds in that order.
  const Tensor along = states * cos;
  const Tensor across = rotate_half(states) * sin;
  return along + across;
}

// Whether the kernel gives a norm the dtype that it has in the exact form.
bool fuses_norm(c10::ScalarType dtype, const Tensor& weight, bool scales_in_float) {
  return kernels::takes(dtype) && weight.size(0) <= kernels::kWidestNorm &&
         (weight.scalar_type() == dtype || (scales_in_float && weight.scalar_type() == at::kFloat));
}

bool fuses_rotary(const Tensor& states, const Tensor& cos) {
  return kernels::takes(states.scalar_type()) && cos.scalar_type() == states.scalar_type() && states.size(-1) % 2 == 0;
}

Tensor repeated(const Tensor& states, int64_t groups) {
  if (groups == 1) return states;
  const int64_t rows = states.size(0), heads = states.size(1), tokens = states.size(2), width = states.size(3);
  return states.unsqueeze(2)
      .expand({rows, heads, groups, tokens, width})
      .reshape({rows, heads * groups, tokens, width});
}

Tensor softmax_with_sinks(const Tensor& scores, const Tensor& sinks) {
  const Tensor columns = sinks.reshape({1, -1, 1, 1}).expand({scores.size(0), -1, scores.size(2), -1});
  Tensor all = at::cat({scores, columns}, -1);
  all = all - std::get<0>(all.max(-1, /*keepdim=*/true));
  return at::softmax(all, -1, all.scalar_type()).slice(-1, 0, -1);
}

Tensor eager_attention(const DecoderConfig& config, const Tensor& query, const Tensor& key, const Tensor& value,
                       const std::optional<Tensor>& mask, const Tensor& sinks, int64_t groups) {
  const Tensor keys = repeated(key, groups);
  const Tensor values = repeated(value, groups);
  Tensor scores = at::matmul(query, keys.transpose(2, 3)) * config.scaling;
  if (mask) scores = scores + *mask;
  const double dropout = config.training ? config.attention_dropout : 0.0;
  if (sinks.defined()) {
    scores = at::dropout(softmax_with_sinks(scores, sinks), dropout, config.training).to(value.scalar_type());
  } else {
    scores = at::softmax(scores, -1, at::kFloat).to(query.scalar_type());
    scores = at::dropout(scores, dropout, config.training);
  }
  return at::matmul(scores, values).transpose(1, 2).contiguous();
}

// A single query token of grouped heads runs on the heads of the keys: [rows, heads, 1, n] as [rows, key heads, groups,
// n]. A mask that all heads share stays as it is.
Tensor on_key_heads(const Tensor& states, int64_t groups) {
  if (states.size(1) == 1) return states;
  return states.reshape({states.size(0), states.size(1) / groups, groups, states.size(3)});
}

// Torch's attention: [rows, heads, tokens, head width]. On the meta device torch takes it apart, which no accelerator
// does, so that its memory is not that of a run.
Tensor fused_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                       double dropout, bool causal, double scaling, bool grouped) {
  if (query.is_meta()) {
    return std::get<0>(
        at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, mask, scaling));
  }
  return at::scaled_dot_product_attention(query, key, value, mask, dropout, causal, scaling, grouped);
}

Tensor sdpa_attention(const DecoderConfig& config, Tensor query, Tensor key, Tensor value, std::optional<Tensor> mask,
                      int64_t groups) {
  const int64_t tokens = query.size(2);
  bool grouped = false;
  if (groups > 1) {
    grouped = !mask && key.size(-1) == value.size(-1) && value.size(-1) <= ops::kWidestGroupedHead;
    if (!grouped && tokens == 1) {
      query = on_key_heads(query, groups);
      if (mask) mask = on_key_heads(*mask, groups);
    } else if (!grouped) {
      key = repeated(key, groups);
      value = repeated(value, groups);
    }
  }
  const bool causal = tokens > 1 && !mask;
  const double dropout = config.training ? config.attention_dropout : 0.0;
  Tensor output = fused_attention(query, key, value, mask, dropout, causal, config.scaling, grouped);
  output = output.reshape({output.size(0), -1, tokens, value.size(-1)});
  return output.transpose(1, 2).contiguous();
}

// Masks of four dimensions are transformers' own.
constexpr int64_t kDimsOfOwnMask = 4;

Tensor attention_of(const DecoderConfig& config, const DecoderInputs& inputs, const Tensor& sinks, const Tensor& query,
                    const Tensor& key, const Tensor& value) {
  const int64_t groups = query.size(1) / key.size(1);
  if (inputs.attention == Attention::kEager) {
    return eager_attention(config, query, key, value, inputs.mask, sinks, groups);
  }
  const bool names_documents = inputs.documents || (inputs.mask && inputs.mask->dim() != kDimsOfOwnMask);
  if (inputs.attention == Attention::kSdpa || !names_documents) {
    if (sinks.defined()) {
      throw std::invalid_argument(
          "[decoder] torch's attention takes no sinks; expected eager, or packed with a mask that names documents");
    }
    return sdpa_attention(config, query, key, value, inputs.mask, groups);
  }
  ops::PackedAttentionOptions options;
  options.dropout = config.training ? config.attention_dropout : 0.0;
  options.scaling = config.scaling;
  if (sinks.defined()) options.sinks = sinks;
  if (inputs.documents) {
    if (inputs.mask && inputs.mask->dim() == 1) options.starts = inputs.mask;
    return ops::packed_attention(query, key, value, *inputs.documents, options);
  }
  const ops::Documents documents = ops::read_documents(*inputs.mask, inputs.positions, query.size(0), query.size(2));
  return ops::packed_attention(query, key, value, documents, options);
}

Tensor attend(const DecoderConfig& config, const DecoderWeights& weights, const DecoderInputs& inputs,
              const Tensor& hidden) {
  const int64_t rows = hidden.size(0), tokens = hidden.size(1);
  const ops::ProjectionUse use{.sums_products = config.arithmetic == Arithmetic::kFast};
  const auto heads_of = [&](const ops::Projection& projection, const Tensor& norm, double eps) {
    Tensor states = ops::project(hidden, projection, use).view({rows, tokens, -1, config.head_dim});
    if (norm.defined()) states = rms_norm(states, norm, eps, config.scales_norms_in_float, config.arithmetic);
    return states;
  };
  const Tensor cos = inputs.cos.unsqueeze(1);
  const Tensor sin = inputs.sin.unsqueeze(1);
  const auto turned = [&](const Tensor& states) {
    if (config.arithmetic == Arithmetic::kFast && fuses_rotary(states, inputs.cos)) {
      return kernels::rotary(states, inputs.cos, inputs.sin).transpose(1, 2);
    }
    return rotated(states.transpose(1, 2), cos, sin);
  };
  const Tensor plain_query = heads_of(weights.query, weights.query_norm, config.query_norm_eps);
  const Tensor plain_key = heads_of(weights.key, weights.key_norm, config.key_norm_eps);
  const Tensor value = heads_of(weights.value, {}, 0).transpose(1, 2);
  const Tensor query = turned(plain_query);
  const Tensor key = turned(plain_key);
  const Tensor output = attention_of(config, inputs, weights.sinks, query, key, value);
  return ops::project(output.reshape({rows, tokens, -1}).contiguous(), weights.output, use);
}

Tensor mlp_of(const DecoderConfig& config, const DecoderWeights& weights, const DecoderInputs& inputs,
              const Tensor& hidden, Tensor* router_logits) {
  if (!weights.moe) {
    return ops::gated_mlp(hidden, weights.gate, weights.up, weights.down, config.activation, inputs.mlp_chunk_tokens,
                          inputs.result_is_read, config.arithmetic);
  }
  const MoeWeights& moe = *weights.moe;
  if (inputs.mlp_chunk_tokens == 0) {
    return mixture_of_experts(config.moe, moe, inputs.experts, hidden, router_logits, config.arithmetic);
  }
  const auto body = [config = config.moe, moe, experts = inputs.experts,
                     arithmetic = config.arithmetic](const Tensor& tokens) {
    return mixture_of_experts(config, moe, experts, tokens.contiguous(), nullptr, arithmetic);
  };
  std::vector<Tensor> parameters;
  for (const ops::Weight& each :
       {moe.gate_up, ops::Weight(moe.gate_up_bias), moe.down, ops::Weight(moe.down_bias), moe.router.weight}) {
    if (each.defined()) parameters.insert(parameters.end(), each.parts().begin(), each.parts().end());
  }
  if (moe.router.bias) parameters.push_back(*moe.router.bias);
  return ops::chunked_map(body, hidden, parameters, {.chunk_tokens = inputs.mlp_chunk_tokens});
}

}  // namespace

Tensor rms_norm(const Tensor& hidden, const Tensor& weight, double eps, bool scales_in_float, Arithmetic arithmetic) {
  const at::ScalarType dtype = hidden.scalar_type();
  if (arithmetic == Arithmetic::kFast && fuses_norm(dtype, weight, scales_in_float)) {
    return kernels::rms_norm(hidden, weight, eps);
  }
  Tensor states = hidden.to(at::kFloat);
  const Tensor variance = states.pow(2).mean(-1, /*keepdim=*/true);
  states = states * at::rsqrt(variance + eps);
  return scales_in_float ? (weight * states).to(dtype) : weight * states.to(dtype);
}

DecoderWeights find_decoder_weights(const std::vector<std::string>& names, const std::vector<Tensor>& tensors,
                                    const Encodings& encodings) {
  if (names.size() != tensors.size()) {
    throw std::invalid_argument(
        concat("[decoder] there are ", names.size(), " names for ", tensors.size(), " weights, expected one for each"));
  }
  std::vector<char> taken(names.size(), 0);
  const auto find = [&](std::string_view wanted, bool needed) -> Tensor {
    Tensor found;
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i] != wanted) continue;
      if (found.defined()) throw std::invalid_argument(concat("[decoder] '", wanted, "' is there twice"));
      found = tensors[i];
      taken[i] = 1;
    }
    if (needed && !found.defined()) {
      throw std::invalid_argument(concat("[decoder] '", wanted, "' is missing, expected a weight with this name"));
    }
    return found;
  };
  const auto weight = [&](const std::string& name) -> ops::Weight {
    const auto encoding = encodings.find(name);
    if (encoding == encodings.end()) return find(name, true);
    std::vector<Tensor> parts;
    for (const std::string& suffix : encoding->second.format->suffixes()) parts.push_back(find(name + suffix, true));
    return quantise::EncodedTensor(encoding->second, std::move(parts));
  };
  const auto projection = [&](const std::string& name) {
    ops::Projection made{weight(name + ".weight")};
    if (Tensor bias = find(name + ".bias", false); bias.defined()) made.bias = std::move(bias);
    return made;
  };
  const auto adaptable = [&](const std::string& name) {
    const std::string before = name + ".lora_A", after = "weight";
    const auto is_down = [&](const std::string& each) {
      return each.starts_with(before + ".") && each.ends_with(after);
    };
    const auto down = std::ranges::find_if(names, is_down);
    if (down == names.end()) return projection(name);
    // ".", or ".default." where PEFT has wrapped the module.
    const std::string between = down->substr(before.size(), down->size() - before.size() - after.size());
    ops::Projection made = projection(between == "." ? name : name + ".base_layer");
    const std::string up = name + ".lora_B" + between;
    made.adapter = ops::LowRankAdapter{find(*down, true), find(up + "weight", true)};
    if (Tensor bias = find(up + "bias", false); bias.defined()) made.adapter->up_bias = std::move(bias);
    return made;
  };
  DecoderWeights weights;
  weights.input_norm = find("input_layernorm.weight", true);
  weights.query = adaptable("self_attn.q_proj");
  weights.key = adaptable("self_attn.k_proj");
  weights.value = adaptable("self_attn.v_proj");
  weights.output = adaptable("self_attn.o_proj");
  weights.query_norm = find("self_attn.q_norm.weight", false);
  weights.key_norm = find("self_attn.k_norm.weight", false);
  weights.sinks = find("self_attn.sinks", false);
  weights.post_norm = find("post_attention_layernorm.weight", true);
  const std::string experts = "mlp.experts.gate_up_proj";
  if (encodings.contains(experts) || std::ranges::find(names, experts) != names.end()) {
    const bool named_gate = std::ranges::find(names, "mlp.gate.weight") != names.end();
    MoeWeights& moe = weights.moe.emplace();
    moe.router = projection(named_gate ? "mlp.gate" : "mlp.router");
    moe.gate_up = weight(experts);
    moe.down = weight("mlp.experts.down_proj");
    moe.gate_up_bias = find("mlp.experts.gate_up_proj_bias", false);
    moe.down_bias = find("mlp.experts.down_proj_bias", false);
  } else {
    weights.gate = adaptable("mlp.gate_proj");
    weights.up = adaptable("mlp.up_proj");
    weights.down = adaptable("mlp.down_proj");
  }
  for (size_t i = 0; i < names.size(); ++i) {
    if (taken[i] == 0) {
      throw std::invalid_argument(concat("[decoder] there is a weight '", names[i], "', which such a layer has not"));
    }
  }
  return weights;
}

void set_lora(DecoderWeights& weights, const LoraNumbersOfLayer& numbers) {
  const std::array<ops::Projection*, kAdaptable.size()> projections = {
      &weights.query, &weights.key, &weights.value, &weights.output, &weights.gate, &weights.up, &weights.down};
  for (size_t i = 0; i < projections.size(); ++i) {
    std::optional<ops::LowRankAdapter>& adapter = projections[i]->adapter;
    if (!adapter) continue;
    adapter->scaling = numbers[i].scaling;
    adapter->dropout = numbers[i].dropout;
    adapter->training = numbers[i].training;
  }
}

Tensor decode(const DecoderConfig& config, const DecoderWeights& weights, const DecoderInputs& inputs,
              Tensor* router_logits) {
  const bool in_float = config.scales_norms_in_float;
  Tensor hidden = rms_norm(inputs.hidden, weights.input_norm, config.input_norm_eps, in_float, config.arithmetic);
  hidden = attend(config, weights, inputs, hidden);
  Tensor residual;
  const c10::ScalarType dtype = hidden.scalar_type();
  if (config.arithmetic == Arithmetic::kFast && inputs.hidden.scalar_type() == dtype &&
      fuses_norm(dtype, weights.post_norm, in_float)) {
    std::tie(residual, hidden) = kernels::add_rms_norm(inputs.hidden, hidden, weights.post_norm, config.post_norm_eps);
  } else {
    residual = inputs.hidden + hidden;
    hidden = rms_norm(residual, weights.post_norm, config.post_norm_eps, in_float, config.arithmetic);
  }
  hidden = mlp_of(config, weights, inputs, hidden, router_logits);
  return residual + hidden;
}

std::string exact_parts(const DecoderConfig& config, const DecoderWeights& weights) {
  const c10::ScalarType dtype = weights.query.weight.scalar_type();
  if (!kernels::takes(dtype)) return concat("all of it, since the weights are ", dtype);
  std::string found;
  const auto note = [&](const auto&... parts) { found += concat(found.empty() ? "" : "; ", parts...); };
  for (const Tensor& norm : {weights.input_norm, weights.post_norm, weights.query_norm, weights.key_norm}) {
    if (!norm.defined() || fuses_norm(dtype, norm, config.scales_norms_in_float)) continue;
    note("norms, since one has a weight of ", norm.size(0), " numbers in ", norm.scalar_type());
    break;
  }
  if (config.head_dim % 2 != 0) note("rotary positions, since heads have ", config.head_dim, " numbers");
  const bool clamps = weights.moe && config.moe.clamped;
  const ops::Activation activation = weights.moe ? config.moe.activation : config.activation;
  if (!clamps && activation != ops::Activation::kSilu) note("gates, since their activation is not silu");
  return found;
}

}  // namespace roundpipe::models
