#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/models/decoder.h>
#include <roundpipe/models/native_layer.h>
#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::models {

// One call of a decoder layer: where its arguments lie among the values that reach it, and what it hands on.
struct DecoderCall {
  static constexpr int kResult = -1;
  static constexpr int kRouterLogits = -2;

  int hidden = 0;
  int cos = 0;
  int sin = 0;
  std::optional<int> mask;  // a value without elements says that there is none
  std::optional<int> positions;
  std::shared_ptr<const ops::Documents> documents;  // of the microbatch; see DecoderInputs
  Attention attention = Attention::kSdpa;
  Experts experts = Experts::kGrouped;
  int64_t mlp_chunk_tokens = 0;
  // Of each value handed on: its place among the inputs, kResult, or, of a layer with experts, kRouterLogits.
  std::vector<int> outputs;
  size_t inputs = 0;                // the number of values; with another one, the layer runs in its general form
  const void* structure = nullptr;  // of what is handed on; part of what the structure of the inputs owns
};

// How a decoder layer is called with these inputs; null: in the general form. The result lives as long as the structure
// of the inputs. Any thread.
using FindDecoderCall = std::function<const DecoderCall*(const runtime::Values&)>;

// Makes a decoder layer's code. `names`: of the parameters, as find_decoder_weights() knows them. Configurations are
// DecoderConfigs.
std::unique_ptr<NativeCode> make_decoder_code(const std::vector<std::string>& names,
                                              const std::vector<at::Tensor>& parameters, FindDecoderCall call,
                                              const Encodings& encodings = {});

}  // namespace roundpipe::models
