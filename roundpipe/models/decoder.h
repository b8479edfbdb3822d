#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/arithmetic.h>
#include <roundpipe/models/implementations.h>
#include <roundpipe/models/lora.h>
#include <roundpipe/models/moe.h>
#include <roundpipe/ops/chunked_mlp.h>
#include <roundpipe/ops/documents.h>

namespace roundpipe::models {

// A layer of a causal language model: an RMS norm, attention with rotary positions and grouped heads, a second RMS
// norm, a gated MLP or a mixture of experts, and a sum after each half. Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and
// GPT-OSS have such layers. The sizes are those of the weights; a sliding window is in the mask.
struct DecoderConfig {
  int64_t head_dim = 0;
  double scaling = 0;  // of the scores
  double input_norm_eps = 0;
  double post_norm_eps = 0;
  double query_norm_eps = 0;  // of the layers that have these norms
  double key_norm_eps = 0;
  bool scales_norms_in_float = false;  // whether a norm's weight multiplies before the result is rounded to its dtype
  double attention_dropout = 0;
  bool training = false;  // whether the attention drops
  ops::Activation activation = ops::Activation::kSilu;
  MoeConfig moe;  // of the layers that have experts
  Arithmetic arithmetic = kDefaultArithmetic;
  LoraNumbersOfLayer lora;  // to be set by set_lora()
};

// Handles of a layer's weights. Undefined norms and sinks, and a projection without a bias, are those that the layer
// has not.
struct DecoderWeights {
  at::Tensor input_norm;
  ops::Projection query, key, value, output;
  at::Tensor query_norm, key_norm;
  at::Tensor sinks;  // [heads]: a score that takes its share of the softmax and adds nothing
  at::Tensor post_norm;
  ops::Projection gate, up, down;  // unless there are experts
  std::optional<MoeWeights> moe;
};

// By name: the weights that are encoded. Instead of such a weight there are its parts, with the suffixes of the format.
using Encodings = std::map<std::string, quantise::Encoding>;

// Takes the weights by their names in transformers' layers, such as "self_attn.q_proj.weight". `names` and `tensors`
// have equal lengths. A projection has the adapter of PEFT's names that is there: "self_attn.q_proj.lora_A.weight", or
// "self_attn.q_proj.lora_A.default.weight" beside "self_attn.q_proj.base_layer.weight"; see set_lora(). Throws
// std::invalid_argument, with the name, if one is missing, unknown or there twice.
DecoderWeights find_decoder_weights(const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors,
                                    const Encodings& encodings = {});

// Sets the numbers of the adapters that the layer has.
void set_lora(DecoderWeights& weights, const LoraNumbersOfLayer& numbers);

// x / sqrt(mean(x^2) + eps) * weight over the last dimension, in fp32; the product with the weight is in the dtype of
// `hidden` unless `scales_in_float`.
at::Tensor rms_norm(const at::Tensor& hidden, const at::Tensor& weight, double eps, bool scales_in_float = false,
                    Arithmetic arithmetic = kDefaultArithmetic);

struct DecoderInputs {
  at::Tensor hidden;    // [rows, tokens, width]
  at::Tensor cos, sin;  // [rows or 1, tokens, head_dim, or half of it if both halves are the same]
  // For kEager added to the scores; for kSdpa as torch takes it; for kPacked, beside documents, where they begin
  // (ops::document_starts). None: causal for kSdpa, no mask for kEager.
  std::optional<at::Tensor> mask;
  Attention attention = Attention::kSdpa;  // kSdpa takes no sinks, nor does kPacked with a mask of another kind
  // For kPacked: the documents of the rows. Null: ops::read_documents reads them from `mask`, if that is a table, and
  // `positions` [rows or 1, tokens], which waits for the device.
  std::shared_ptr<const ops::Documents> documents;
  std::optional<at::Tensor> positions;
  Experts experts = Experts::kGrouped;  // of the layers that have them
  int64_t mlp_chunk_tokens = 0;         // tokens of a row whose inner activations of the MLP exist at a time; 0: all
  bool result_is_read = true;  // else only the result's graph counts: its values may be any, and the last product of
                               // the MLP is left out
};

// Computes the layer's new hidden states. In exact arithmetic, it dispatches the operators that transformers' modelling
// code dispatches, in the same order and dtypes, so values and gradients have the same bits. In fast arithmetic, norms,
// rotary positions and gates are fused kernels, but for what these do not take: see exact_parts().
// `router_logits`: null, or set as mixture_of_experts() says, which needs experts and no chunks.
// Thread safety: any thread; no state is kept between calls. Errors: std::invalid_argument for an attention that
// takes no sinks, if there are any; torch's own for shapes that do not match.
at::Tensor decode(const DecoderConfig& config, const DecoderWeights& weights, const DecoderInputs& inputs,
                  at::Tensor* router_logits = nullptr);

// Which parts of a layer compute exactly although its arithmetic is fast, and why, for the user; empty: none.
std::string exact_parts(const DecoderConfig& config, const DecoderWeights& weights);

}  // namespace roundpipe::models
