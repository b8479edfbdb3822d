#pragma once

#include <utility>
#include <vector>

#include <roundpipe/optim/algorithm.h>

namespace roundpipe::optim {

// An algorithm's options as torch.optim's param_groups have them.
struct OptionNames {
  using Number = double Hyperparameters::*;
  using Flag = bool Hyperparameters::*;

  Algorithm algorithm;
  const char* class_name;
  std::vector<std::pair<const char*, Number>> numbers;
  std::vector<std::pair<const char*, std::pair<Number, Number>>> pairs;
  std::vector<std::pair<const char*, Flag>> flags;
};

// Lives until the process has ended.
const OptionNames& option_names(Algorithm algorithm);

}  // namespace roundpipe::optim
