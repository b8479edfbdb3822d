#pragma once

#include <array>
#include <string_view>

namespace roundpipe::models {

// The projections of a decoder layer that may have a LoRA adapter, by their names in transformers' layers.
inline constexpr std::array<std::string_view, 7> kAdaptable = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

// The numbers of an adapter, see ops::LowRankAdapter.
struct LoraNumbers {
  double scaling = 1;
  double dropout = 0;
  bool training = false;
};
// By kAdaptable; of a projection without an adapter, they mean nothing.
using LoraNumbersOfLayer = std::array<LoraNumbers, kAdaptable.size()>;

}  // namespace roundpipe::models
