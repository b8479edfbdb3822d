#pragma once

#include <optional>
#include <string>

#include <roundpipe/optim/algorithm.h>
#include <roundpipe/saving/state_value.h>

namespace roundpipe {

// The options of one group of an optimizer as torch.optim's param_groups have them, which is how checkpoints hold them.

// `first_rate`: the learning rate that a schedule goes by ("initial_lr").
StateValue options_dict(optim::Algorithm algorithm, const optim::Hyperparameters& options,
                        std::optional<double> first_rate);

struct GroupOptions {
  optim::Hyperparameters options;
  std::optional<double> first_rate;
};
// What the dictionary holds, over `defaults`. Throws std::invalid_argument, naming it, for an option that this
// algorithm has not in C++.
GroupOptions read_options(optim::Algorithm algorithm, const StateValue& dict, const optim::Hyperparameters& defaults);

}  // namespace roundpipe
