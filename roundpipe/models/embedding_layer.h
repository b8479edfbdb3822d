#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/models/decoder.h>
#include <roundpipe/models/native_layer.h>
#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::models {

// The first part of a causal language model: the embedding, the mask of layers with kSdpa and without a window, and the
// positions. Layers with kPacked take no mask, but the documents.
struct EmbeddingConfig {
  int64_t padding_index = -1;  // the row of the weight that gets no gradient; -1: none
  double rotary_scaling = 1;
  bool rotary_halves = false;  // see rotary_tables()
  // kFast: padding that nobody reads attends as it likes (MaskOptions::padding_may_attend), and for kPacked, the mask
  // is ops::document_starts().
  Arithmetic arithmetic = kDefaultArithmetic;
};

struct EmbeddingTensors {
  at::Tensor weight;       // [vocabulary, width]
  at::Tensor frequencies;  // of the rotary positions, fp32
};

// One call of it: where its arguments lie among the values that reach it. It hands on the hidden states, the cosines,
// the sines, the mask, the positions, and then the values `kept`. A mask without elements says that there is none.
struct EmbeddingCall {
  static constexpr int kHidden = 0, kCos = 1, kSin = 2, kMask = 3, kPositions = 4, kKept = 5;

  int ids = 0;                        // [rows, tokens]
  std::optional<int> attention_mask;  // [rows, tokens]
  std::optional<int> positions;       // [rows or 1, tokens]; none: from 0 on
  std::vector<int> kept;
  Attention attention = Attention::kSdpa;           // of the layers; not kEager
  std::shared_ptr<const ops::Documents> documents;  // of the microbatch, see TokenPlaces; not null
  size_t inputs = 0;                                // as in DecoderCall
  const void* structure = nullptr;                  // as in DecoderCall
};

using FindEmbeddingCall = std::function<const EmbeddingCall*(const runtime::Values&)>;  // see FindDecoderCall

// Makes the part's code. Configurations are EmbeddingConfigs.
std::unique_ptr<NativeCode> make_embedding_code(EmbeddingTensors tensors, FindEmbeddingCall call);

}  // namespace roundpipe::models
