#pragma once

#include <memory>
#include <string>

#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::layers {

struct EmulatedLayerOptions {
  double forward_ms = 0;
  double backward_ms = 0;  // without the recompute
  double update_ms = 0;    // of a fused optimizer; 0 = a real update
  at::Tensor weight;       // moves as a real layer's weights would, and gets a gradient
  at::Tensor frozen;       // moves, too, without a gradient; undefined = none
  // Structure of the outputs; null = that of the inputs.
  std::shared_ptr<const void> structure;
};

// A native layer that takes time instead of computing: it occupies its virtual device for the given durations and
// hands its first input on (times one), so that the real engine's schedule can be measured with many devices on few
// cores. REQUIRES: every input is floating point.
std::unique_ptr<runtime::Layer> make_emulated_layer(std::string name, EmulatedLayerOptions options);

}  // namespace roundpipe::layers
