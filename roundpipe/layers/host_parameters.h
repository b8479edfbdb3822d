#pragma once

#include <memory>
#include <string>
#include <vector>

#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::layers {

// A layer that only holds parameters: what a model uses on the host beside its pipelines. Their gradients are those
// that autograd leaves in .grad. It never runs on a device.
std::unique_ptr<runtime::Layer> make_host_parameters(std::string name, std::vector<memory::NamedTensor> parameters);

}  // namespace roundpipe::layers
