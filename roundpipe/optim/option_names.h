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
  // A tuple of several numbers, a whole number, and a flag that is one of two texts, of which the first is none too.
  std::vector<std::pair<const char*, std::vector<Number>>> tuples = {};
  std::vector<std::pair<const char*, Number>> counts = {};
  struct TextFlag {
    const char* name;
    Flag flag;
    const char* off;
    const char* on;
  };
  std::vector<TextFlag> choices = {};
};

// Lives until the process has ended.
const OptionNames& option_names(Algorithm algorithm);

}  // namespace roundpipe::optim
