#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/arithmetic.h>
#include <roundpipe/models/native_layer.h>
#include <roundpipe/ops/projection.h>
#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::models {

// The last part of a causal language model: an RMS norm, the head, and the loss if there are labels.
struct HeadConfig {
  double norm_eps = 0;
  bool scales_norm_in_float = false;  // see DecoderConfig
  Arithmetic arithmetic = kDefaultArithmetic;
};

struct HeadWeights {
  at::Tensor norm;
  ops::Projection head;
};

// One call of it: where its arguments lie among the values that reach it, and what it hands on: the loss, the logits,
// or both, the loss first.
struct HeadCall {
  int hidden = 0;
  std::optional<int> labels;    // none: there is no loss
  std::optional<int> items;     // a tensor that divides the losses' sum, which is then the loss; else their mean
  std::optional<double> share;  // factor of the loss
  bool gives_logits = false;    // which are given without labels in any case
  std::optional<int64_t> chunk_tokens;  // see TokenLossOptions; counts where only the loss is given
  int64_t chunk_logit_bytes = 0;        // likewise
  size_t inputs = 0;                    // as in DecoderCall
  const void* structure = nullptr;      // as in DecoderCall
};

using FindHeadCall = std::function<const HeadCall*(const runtime::Values&)>;  // see FindDecoderCall

// Makes the part's code. Configurations are HeadConfigs. In exact arithmetic, it dispatches the operators
// of transformers' code.
std::unique_ptr<NativeCode> make_head_code(HeadWeights weights, FindHeadCall call);

}  // namespace roundpipe::models
