#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <torch/nn/module.h>

#include <roundpipe/api/values.h>

namespace roundpipe {

using NamedParameters = std::vector<std::pair<std::string, at::Tensor>>;

// A layer's code with the tensors that it computes with. A layer has the user's own instance, whose code never runs,
// and copies of it, one for each device, whose tensors the engine points at device memory.
// Thread safety: one thread at a time.
struct LayerInstance {
  // What runs on a device. Throws what the layer's code throws.
  std::function<runtime::Values(const runtime::Values&)> run;
  // Makes another instance, with tensors of its own whose values do not matter. Runs on the caller's thread, and rarely
  // on a device's. Throws std::invalid_argument if it cannot be made.
  std::function<std::shared_ptr<LayerInstance>()> copy;
  // Distinct tensors, with their names. The names and their order are those of every copy.
  NamedParameters parameters;
  NamedParameters buffers;
  std::shared_ptr<torch::nn::Module> module;  // null for a function
  // What the module had when the instance was made: parameters, then buffers, and itself with its submodules.
  NamedParameters found;
  std::vector<std::shared_ptr<torch::nn::Module>> submodules;
};

// How a kind of module runs: the function of an instance of it.
using ModuleRuns =
    std::function<std::function<runtime::Values(const runtime::Values&)>(std::shared_ptr<torch::nn::Module>)>;
// Makes another module like the given one.
using ModuleCopies = std::function<std::shared_ptr<torch::nn::Module>(const torch::nn::Module&)>;

}  // namespace roundpipe
