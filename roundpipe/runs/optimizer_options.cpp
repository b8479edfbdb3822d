#include <roundpipe/runs/optimizer_options.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include <roundpipe/core/error.h>
#include <roundpipe/optim/option_names.h>

namespace roundpipe {

using optim::Algorithm;
using optim::Hyperparameters;

namespace {

constexpr const char* kDecoupled = "decoupled_weight_decay";

// How torch computes the same update; the result has the same meaning with any of them.
constexpr std::array kWaysOfTorch{"foreach", "capturable", "differentiable", "fused"};

}  // namespace

StateValue options_dict(Algorithm algorithm, const Hyperparameters& options, std::optional<double> first_rate) {
  const optim::OptionNames& names = optim::option_names(algorithm);
  std::vector<std::pair<std::string, StateValue>> entries;
  for (const auto& [name, number] : names.numbers) entries.emplace_back(name, options.*number);
  for (const auto& [name, pair] : names.pairs)
    entries.emplace_back(name, StateValue::Tuple{{options.*pair.first, options.*pair.second}});
  for (const auto& [name, flag] : names.flags) entries.emplace_back(name, options.*flag);
  for (const auto& [name, members] : names.tuples) {
    StateValue::Tuple numbers;
    for (const auto member : members) numbers.items.emplace_back(options.*member);
    entries.emplace_back(name, std::move(numbers));
  }
  for (const auto& [name, count] : names.counts) entries.emplace_back(name, static_cast<int64_t>(options.*count));
  for (const auto& choice : names.choices)
    entries.emplace_back(choice.name, std::string(options.*choice.flag ? choice.on : choice.off));
  if (algorithm == Algorithm::kAdamW) entries.emplace_back(kDecoupled, true);
  if (first_rate) entries.emplace_back("initial_lr", *first_rate);
  return StateValue::dict(std::move(entries));
}

GroupOptions read_options(Algorithm algorithm, const StateValue& dict, const Hyperparameters& defaults) {
  const optim::OptionNames& names = optim::option_names(algorithm);
  GroupOptions read{defaults, std::nullopt};
  for (const auto& [key, value] : dict.entries()) {
    const std::string& name = key.as_string();
    const auto is_it = [&](const auto& known) { return name == known.first; };
    if (const auto number = std::ranges::find_if(names.numbers, is_it); number != names.numbers.end()) {
      read.options.*number->second = value.as_double();
    } else if (const auto pair = std::ranges::find_if(names.pairs, is_it); pair != names.pairs.end()) {
      if (value.items().size() != 2) {
        throw WrongStateType(concat("[checkpoint] '", name, "' has ", value.items().size(), " values, expected 2"));
      }
      const StateValue& first = value.items().at(0);
      // Adafactor's first eps may be none, which is the smallest step of fp32.
      read.options.*pair->second.first =
          first.is_none() ? double{std::numeric_limits<float>::epsilon()} : first.as_double();
      read.options.*pair->second.second = value.items().at(1).as_double();
    } else if (const auto flag = std::ranges::find_if(names.flags, is_it); flag != names.flags.end()) {
      read.options.*flag->second = value.as_bool();
    } else if (const auto tuple = std::ranges::find_if(names.tuples, is_it); tuple != names.tuples.end()) {
      if (value.items().size() != tuple->second.size()) {
        throw WrongStateType(
            concat("[checkpoint] '", name, "' has ", value.items().size(), " values, expected ", tuple->second.size()));
      }
      for (size_t i = 0; i < tuple->second.size(); ++i)
        read.options.*tuple->second[i] = value.items().at(i).as_double();
    } else if (const auto count = std::ranges::find_if(names.counts, is_it); count != names.counts.end()) {
      read.options.*count->second = static_cast<double>(value.as_int());
    } else if (const auto choice = std::ranges::find(names.choices, name, &optim::OptionNames::TextFlag::name);
               choice != names.choices.end()) {
      read.options.*choice->flag = !value.is_none() && value.as_string() == choice->on;
    } else if (name == "initial_lr") {
      read.first_rate = value.as_double();
    } else if (std::ranges::find(kWaysOfTorch, name) == kWaysOfTorch.end() &&
               !(algorithm == Algorithm::kAdamW && name == kDecoupled)) {
      throw std::invalid_argument(concat("[load_checkpoint] the saved ", names.class_name, " has the option '", name,
                                         "', which C++ does not know; load the checkpoint from Python"));
    }
  }
  return read;
}

}  // namespace roundpipe
