#pragma once

#include <utility>

#include <ATen/core/Tensor.h>

#include <roundpipe/language/config.h>

namespace roundpipe::language {

// The rotary positions of a model, with the operators of transformers' code. Never changes; any thread.
class Rotary {
 public:
  explicit Rotary(const Config& config);

  // The cosines and sines of positions [rows, tokens], in `dtype` and on the positions' device: [rows, tokens,
  // head_dim] each, or half as wide with RotaryConfig::halves. REQUIRES: positions below the model's max_positions,
  // beyond which kDynamic has other frequencies.
  std::pair<at::Tensor, at::Tensor> cos_sin(const at::Tensor& positions, c10::ScalarType dtype) const;

 private:
  at::Tensor inverse_frequencies_;  // [head_dim / 2], fp32, on the host
  double scaling_ = 1;              // of cosines and sines
  bool halves_ = false;
};

}  // namespace roundpipe::language
