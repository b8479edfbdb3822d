#pragma once

#include <memory>
#include <string>

#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::layers {

struct EmulatedLayerOptions {
  double forward_ms = 0;
  double backward_ms = 0;  // without the recompute
  double update_ms = 0;    // of a fused optimizer; 0 = a real update
  at::Tensor weight;       // moves like a real layer's weights, and gets a gradient
  at::Tensor frozen;       // moves like frozen weights, without a gradient; undefined = none
  // Structure of the outputs; null = the structure of the inputs.
  std::shared_ptr<const void> structure;
};

// Makes a native layer that takes time instead of computing: it occupies its virtual device for the given durations and
// returns a copy of its first input. With it, the engine's real schedule can be measured for many devices on few cores.
// REQUIRES: the first input is floating point.
std::unique_ptr<runtime::Layer> make_emulated_layer(std::string name, EmulatedLayerOptions options);

}  // namespace roundpipe::layers
