#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <torch/optim/optimizer.h>

#include <roundpipe/optim/algorithm.h>
#include <roundpipe/saving/state_value.h>

namespace roundpipe {

// libtorch's Adam, AdamW, SGD, Adagrad and RMSprop as checkpoints hold optimizers of torch: as PyTorch's state_dict().
// Thread safety: the caller's thread.

// Which one it is. Throws std::invalid_argument, for `where`, for any other class.
optim::Algorithm algorithm_of(const torch::optim::Optimizer& optimizer, const char* where);

// The options of each group.
std::vector<optim::Hyperparameters> options_of(const torch::optim::Optimizer& optimizer);
// Sets them. REQUIRES: as many as there are groups.
void set_options(torch::optim::Optimizer& optimizer, const std::vector<optim::Hyperparameters>& options);

// {number of the parameter, counted over the groups: {"exp_avg": tensor, ...}}, with the tensors in use.
StateValue state_of(torch::optim::Optimizer& optimizer);
// Reads such a dictionary, and returns a function that gives its contents to the optimizer. Throws
// std::invalid_argument for a state of other parameters; then nothing has been changed.
std::function<void()> read_state(torch::optim::Optimizer& optimizer, const StateValue& state);

}  // namespace roundpipe
