#pragma once

#include <vector>

#include <roundpipe/device/device.h>
#include <roundpipe/runtime/model/model_state.h>
#include <roundpipe/runtime/model/values.h>
#include <roundpipe/simulate/memory_simulator.h>

namespace roundpipe {

// The footprint of each layer of `model` for one microbatch: `batch` and `label`, on the host. Each kind of layer (see
// runtime::Layer::kind) runs once, on this thread, forward and, if the step `trains`, backward; only shapes count.
// `loss`: null if gradients of the outputs come from elsewhere. Throws what a layer or the loss throws, and
// std::invalid_argument for a layer that writes its parameters in its forward. Draws of random numbers change nothing.
// REQUIRES: no call runs, and the layers' parameters show their weights.
std::vector<simulate::LayerFootprint> measure_layers(const runtime::ModelState& model, const runtime::Values& batch,
                                                     const runtime::Values& label, const LossFunction& loss,
                                                     bool trains, device::Device& device);

}  // namespace roundpipe
