#pragma once

#include <memory>
#include <string>
#include <vector>

#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::layers {

// Makes a layer that only holds parameters, which a model uses on the host outside of its pipelines. Autograd leaves
// their gradients in .grad. The layer never runs on a device: its make_shell throws Error.
std::unique_ptr<runtime::Layer> make_host_parameters(std::string name, std::vector<memory::NamedTensor> parameters);

}  // namespace roundpipe::layers
