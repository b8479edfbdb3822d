#include <roundpipe/runs/optimizer_options.h>

#include <algorithm>
#include <array>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

#include <roundpipe/core/error.h>

namespace roundpipe {

using optim::Algorithm;
using optim::Hyperparameters;

namespace {

using Number = double Hyperparameters::*;
using Flag = bool Hyperparameters::*;

struct Names {
  Algorithm algorithm;
  const char* class_name;
  std::vector<std::pair<const char*, Number>> numbers;
  std::vector<std::pair<const char*, std::pair<Number, Number>>> pairs;
  std::vector<std::pair<const char*, Flag>> flags;
};

constexpr std::pair<const char*, Number> kLr{"lr", &Hyperparameters::lr};
constexpr std::pair<const char*, Number> kDecay{"weight_decay", &Hyperparameters::weight_decay};
constexpr std::pair<const char*, Number> kEps{"eps", &Hyperparameters::eps};
constexpr std::pair<const char*, Number> kMomentum{"momentum", &Hyperparameters::momentum};
constexpr std::pair<const char*, Number> kAlpha{"alpha", &Hyperparameters::alpha};
constexpr std::pair<const char*, std::pair<Number, Number>> kBetas{"betas",
                                                                   {&Hyperparameters::beta1, &Hyperparameters::beta2}};
constexpr std::pair<const char*, Flag> kMaximize{"maximize", &Hyperparameters::maximize};
constexpr std::pair<const char*, Flag> kDecoupled{"decoupled_weight_decay", &Hyperparameters::decoupled_weight_decay};

const Names& names_of(Algorithm algorithm) {
  // Never destroyed: saves go on while the process ends.
  static const auto& all = *new std::vector<Names>{
      {Algorithm::kAdam,
       "Adam",
       {kLr, kEps, kDecay},
       {kBetas},
       {{"amsgrad", &Hyperparameters::amsgrad}, kMaximize, kDecoupled}},
      {Algorithm::kAdamW, "AdamW", {kLr, kEps, kDecay}, {kBetas}, {{"amsgrad", &Hyperparameters::amsgrad}, kMaximize}},
      {Algorithm::kSGD,
       "SGD",
       {kLr, kMomentum, {"dampening", &Hyperparameters::dampening}, kDecay},
       {},
       {{"nesterov", &Hyperparameters::nesterov}, kMaximize}},
      {Algorithm::kAdagrad,
       "Adagrad",
       {kLr,
        {"lr_decay", &Hyperparameters::lr_decay},
        kDecay,
        {"initial_accumulator_value", &Hyperparameters::initial_accumulator_value},
        kEps},
       {},
       {kMaximize}},
      {Algorithm::kAdadelta, "Adadelta", {kLr, {"rho", &Hyperparameters::rho}, kEps, kDecay}, {}, {kMaximize}},
      {Algorithm::kAdamax, "Adamax", {kLr, kEps, kDecay}, {kBetas}, {kMaximize}},
      {Algorithm::kNAdam,
       "NAdam",
       {kLr, kEps, kDecay, {"momentum_decay", &Hyperparameters::momentum_decay}},
       {kBetas},
       {kMaximize, kDecoupled}},
      {Algorithm::kRAdam, "RAdam", {kLr, kEps, kDecay}, {kBetas}, {kMaximize, kDecoupled}},
      {Algorithm::kRMSprop,
       "RMSprop",
       {kLr, kMomentum, kAlpha, kEps, kDecay},
       {},
       {{"centered", &Hyperparameters::centered}, kMaximize}},
      {Algorithm::kRprop,
       "Rprop",
       {kLr},
       {{"etas", {&Hyperparameters::eta_minus, &Hyperparameters::eta_plus}},
        {"step_sizes", {&Hyperparameters::step_size_min, &Hyperparameters::step_size_max}}},
       {kMaximize}},
      {Algorithm::kASGD,
       "ASGD",
       {kLr, {"lambd", &Hyperparameters::lambd}, kAlpha, {"t0", &Hyperparameters::t0}, kDecay},
       {},
       {kMaximize}},
      {Algorithm::kAdafactor,
       "Adafactor",
       {kLr, {"beta2_decay", &Hyperparameters::beta2_decay}, {"d", &Hyperparameters::clip_threshold}, kDecay},
       {{"eps", {&Hyperparameters::eps, &Hyperparameters::eps2}}},
       {kMaximize}},
      {Algorithm::kLion, "Lion", {kLr, kDecay}, {kBetas}, {kMaximize}},
  };
  return *std::ranges::find(all, algorithm, &Names::algorithm);
}

// How torch computes the same update; the result has the same meaning with any of them.
constexpr std::array kWaysOfTorch{"foreach", "capturable", "differentiable", "fused"};

}  // namespace

std::string class_name(Algorithm algorithm) { return names_of(algorithm).class_name; }

StateValue options_dict(Algorithm algorithm, const Hyperparameters& options, std::optional<double> first_rate) {
  const Names& names = names_of(algorithm);
  std::vector<std::pair<std::string, StateValue>> entries;
  for (const auto& [name, number] : names.numbers) entries.emplace_back(name, options.*number);
  for (const auto& [name, pair] : names.pairs)
    entries.emplace_back(name, StateValue::Tuple{{options.*pair.first, options.*pair.second}});
  for (const auto& [name, flag] : names.flags) entries.emplace_back(name, options.*flag);
  if (algorithm == Algorithm::kAdamW) entries.emplace_back(kDecoupled.first, true);
  if (first_rate) entries.emplace_back("initial_lr", *first_rate);
  return StateValue::dict(std::move(entries));
}

GroupOptions read_options(Algorithm algorithm, const StateValue& dict, const Hyperparameters& defaults) {
  const Names& names = names_of(algorithm);
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
    } else if (name == "initial_lr") {
      read.first_rate = value.as_double();
    } else if (std::ranges::find(kWaysOfTorch, name) == kWaysOfTorch.end() &&
               !(algorithm == Algorithm::kAdamW && is_it(kDecoupled))) {
      throw std::invalid_argument(concat("[load_checkpoint] the saved ", names.class_name, " has the option '", name,
                                         "', which C++ does not know; load the checkpoint from Python"));
    }
  }
  return read;
}

}  // namespace roundpipe
