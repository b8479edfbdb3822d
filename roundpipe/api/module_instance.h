#pragma once

#include <memory>
#include <string>

#include <torch/nn/modules/container/any.h>

#include <roundpipe/api/layer_instance.h>

namespace roundpipe {

// Instances of torch::nn modules. The caller's thread, unless LayerInstance says otherwise.

// Of a module that runs as `runs` says; `copies` makes another module. If a parameter or buffer is registered under
// several names, it counts once, under the first.
//
// torch::nn::Linear and torch::nn::Embedding may be tied as libtorch's users do it, by assigning another module's
// tensor to the member `weight`, or `bias` of Linear: the registered tensor, which their forward then does not use,
// gives way to it. Throws std::invalid_argument if there is no module.
std::shared_ptr<LayerInstance> module_instance(std::shared_ptr<torch::nn::Module> module, const ModuleRuns& runs,
                                               ModuleCopies copies);

// Of a child of a torch::nn::Sequential, called as torch::nn::AnyModule calls it.
std::shared_ptr<LayerInstance> any_instance(const torch::nn::AnyModule& module);

// Throws std::invalid_argument if parameters, buffers or submodules of the module were added, removed or replaced since
// `instance` was made, as far as the module tells. `name`: the layer's.
void require_unchanged(const LayerInstance& instance, const std::string& name);

}  // namespace roundpipe
