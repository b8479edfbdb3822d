#pragma once

#include <string>
#include <vector>

#include <roundpipe/simulate/link_search.h>

// The models and machines of bench/plan_cases, read from their files, and two presets.
namespace plan_cases {

struct Case {
  std::string name;
  roundpipe::schedule::LayerCosts costs;
  roundpipe::schedule::Cluster cluster;
  roundpipe::simulate::LinkRules rules;
  int microbatches = 1;
};

// The cases of those names, such as "07-experts", and of the presets "llama3.1-8b" and "qwen3-1.7b".
std::vector<Case> named(const std::vector<std::string>& names);

}  // namespace plan_cases
