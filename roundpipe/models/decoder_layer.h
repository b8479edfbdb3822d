#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/models/decoder.h>
#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::models {

// One call of a decoder layer: where its arguments lie among the values that reach it, and what it hands on.
struct DecoderCall {
  static constexpr int kResult = -1;
  static constexpr int kRouterLogits = -2;

  int hidden = 0;
  int cos = 0;
  int sin = 0;
  std::optional<int> mask;
  std::optional<int> positions;
  Attention attention = Attention::kSdpa;
  Experts experts = Experts::kGrouped;
  int64_t mlp_chunk_tokens = 0;
  // Of each value handed on: its place among the inputs, kResult, or, of a layer with experts, kRouterLogits.
  std::vector<int> outputs;
  size_t inputs = 0;                // the number of values; with another one, the layer runs in its general form
  const void* structure = nullptr;  // of what is handed on; part of what the structure of the inputs owns
};

struct DecoderLayerParts {
  // The same layer in a form that runs any call. It holds the parameters and says what has changed. It has no buffers.
  std::unique_ptr<runtime::Layer> general;
  std::vector<std::string> names;  // of general's parameters, as find_decoder_weights() knows them
  // The configuration for a call that is made now; none: the call runs in the general form. Asked on the caller's
  // thread when a call is made. Returns the same object as before if nothing has changed.
  std::function<std::shared_ptr<const DecoderConfig>()> config;
  // How the layer is called with these inputs; null: in the general form. The result lives as long as the structure of
  // the inputs. Any thread.
  std::function<const DecoderCall*(const runtime::Values&)> call;
};

// Makes a layer that computes natively where `config` and `call` allow it, and otherwise has `general` do it. Both use
// the same tensors. A native forward, and its backward, take no lock.
std::unique_ptr<runtime::Layer> make_decoder_layer(DecoderLayerParts parts);

}  // namespace roundpipe::models
