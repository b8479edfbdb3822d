#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/api/layer.h>
#include <roundpipe/language/config.h>
#include <roundpipe/language/options.h>
#include <roundpipe/language/router_loss.h>
#include <roundpipe/models/decoder.h>
#include <roundpipe/models/token_loss.h>
#include <roundpipe/ops/documents.h>

namespace roundpipe::language {

// What enters the first layer: one microbatch.
struct Tokens {
  at::Tensor ids;     // [rows, tokens], int64
  at::Tensor labels;  // [rows, tokens]; undefined: logits are wanted
  // See models::TokenPlaces. The documents are those of one microbatch: a batch is to be cut before they are found.
  at::Tensor attention_mask;
  at::Tensor positions;
  std::shared_ptr<const ops::Documents> documents;
  int64_t counted = 0;            // labels of the whole batch that count
  int64_t chunk_logit_bytes = 0;  // see ops::LinearCrossEntropyOptions
  bool training = false;          // whether dropouts drop
};

// What goes from layer to layer.
struct Hidden {
  at::Tensor values;  // [rows, tokens, width]
  at::Tensor cos, sin;
  at::Tensor mask, window_mask;  // of layers without and with a window; undefined: none
  std::shared_ptr<const ops::Documents> documents, window_documents;  // likewise, for Attention::kPacked; never null
  at::Tensor labels;
  // Of models whose routers have a loss, when there are labels.
  RouterSums routers;
  at::Tensor attention_mask;
  int64_t counted = 0;
  int64_t chunk_logit_bytes = 0;
  bool training = false;
};

// The attention of a model: as the options say, or else kSdpa, and kEager for a model with sinks. Throws
// std::invalid_argument for kSdpa with sinks, which torch's attention does not take.
models::Attention attention_of(const Config& config, const LayerOptions& options);

using models::kIgnoredLabel;     // -100: labels that do not count
using models::kWholeLogitBytes;  // 16 MiB: larger logits are computed in chunks, unless a number of tokens is given

// The name of a weight in a model's folder, and its shape.
struct WeightShape {
  std::string name;
  std::vector<int64_t> shape;
};

// The weights of a model, in the order of its layers: the embedding, the decoder layers, the last norm and, unless it
// is tied, the head.
std::vector<WeightShape> weight_shapes(const Config& config);

// The weights of the adapters, in the order of the layers, by the names of the model's parameters:
// "model.layers.0.self_attn.q_proj.lora_A.weight".
std::vector<WeightShape> adapter_shapes(const Config& config, const LoraOptions& lora);

// The layers of a model in `dtype`, whose weights hold any values: the embedding, which also makes positions and masks,
// the decoder layers, the last norm, and the head. The head returns the loss of a microbatch, the sum over its labels
// that count divided by Tokens::counted, or logits where there are no labels. Where routers have a loss, a microbatch
// adds its own, weighted by its share of the counted labels. A label belongs to the token before it,
// as in transformers. Names of layers and parameters make the names of the folder: "model.layers.0" and
// "mlp.up_proj.weight".
// With `lora`, only the adapters require grad. They are fp32, as PEFT makes them. Norms are fp32 where
// Config::float_norms says so.
// `encodings`: by name of a weight, how it is encoded; the parameters are then its parts.
std::vector<Layer> make_layers(const Config& config, c10::ScalarType dtype, const LayerOptions& options,
                               const std::optional<LoraOptions>& lora, const models::Encodings& encodings = {});

}  // namespace roundpipe::language

template <>
struct roundpipe::TensorsOf<roundpipe::language::Tokens> {
  template <typename Visit>
  static void visit(roundpipe::language::Tokens& value, Visit&& visit) {
    visit(value.ids);
    visit(value.labels);
    visit(value.attention_mask);
    visit(value.positions);
  }
};

template <>
struct roundpipe::TensorsOf<roundpipe::language::Hidden> {
  template <typename Visit>
  static void visit(roundpipe::language::Hidden& value, Visit&& visit) {
    visit(value.values);
    visit(value.cos);
    visit(value.sin);
    visit(value.mask);
    visit(value.window_mask);
    visit(value.labels);
    visit(value.routers.chosen);
    visit(value.routers.probabilities);
    visit(value.attention_mask);
  }
};
