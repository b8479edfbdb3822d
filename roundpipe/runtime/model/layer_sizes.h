#pragma once

#include <vector>

#include <roundpipe/runtime/model/model_state.h>
#include <roundpipe/simulate/memory_simulator.h>

namespace roundpipe::runtime {

// The layers of a model as the memory simulator counts them, by the user's current flags. Keys of frozen blocks are
// their indices in the model. Caller's thread.
std::vector<simulate::LayerBytes> layer_sizes(const ModelState& model);

}  // namespace roundpipe::runtime
