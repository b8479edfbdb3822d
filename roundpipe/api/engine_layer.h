#pragma once

#include <memory>
#include <string>

#include <roundpipe/api/layer_instance.h>
#include <roundpipe/runtime/model/layer.h>

namespace roundpipe {

// The layer as the engine runs it. Keeps `original`, whose tensors are the user's. Makes one copy of it at once, of
// which all further copies are made, so that what the user does to the module's plain members later has no effect.
// Copies draw no random numbers from the user's generators. Throws std::invalid_argument if the copy has other
// parameters or buffers than the original, or shares a tensor with it.
std::unique_ptr<runtime::Layer> make_engine_layer(std::string name, std::shared_ptr<LayerInstance> original);

// For a layer's code: whether somebody reads the values of what it returns, as runtime::LayerContext says of the layer
// that this thread runs.
bool outputs_are_read();

}  // namespace roundpipe
