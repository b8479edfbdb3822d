#include <roundpipe/api/optimizer.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

#include <roundpipe/core/error.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/optim/parameter_update.h>

namespace roundpipe {

using optim::Algorithm;
using optim::Hyperparameters;

namespace {

// What torch.optim's constructors have by default, where it is not the default of Hyperparameters.
Hyperparameters defaults_of(Algorithm algorithm) {
  Hyperparameters options;
  switch (algorithm) {
    case Algorithm::kAdamW:
      options.weight_decay = 1e-2;
      break;
    case Algorithm::kAdagrad:
      options.lr = 1e-2;
      options.eps = 1e-10;
      break;
    case Algorithm::kAdadelta:
      options.lr = 1;
      options.eps = 1e-6;
      break;
    case Algorithm::kAdamax:
    case Algorithm::kNAdam:
      options.lr = 2e-3;
      break;
    case Algorithm::kRMSprop:
    case Algorithm::kRprop:
      options.lr = 1e-2;
      break;
    case Algorithm::kASGD:
      options.lr = 1e-2;
      options.alpha = 0.75;
      break;
    case Algorithm::kAdafactor:
      options.lr = 1e-2;
      options.eps = std::numeric_limits<float>::epsilon();
      break;
    case Algorithm::kLion:
      options.lr = 1e-4;
      options.beta2 = 0.99;
      break;
    case Algorithm::kAdam:
    case Algorithm::kSGD:
    case Algorithm::kRAdam:
      break;
  }
  return options;
}

template <typename Options>
Hyperparameters adam_options(Hyperparameters options, const Options& from) {
  options.lr = from.lr();
  std::tie(options.beta1, options.beta2) = from.betas();
  options.eps = from.eps();
  options.weight_decay = from.weight_decay();
  options.amsgrad = from.amsgrad();
  return options;
}

// Refuses values that torch.optim's constructors refuse, NaN among them. `where`: begins the error.
void require_in_range(const Hyperparameters& options, const std::string& where) {
  const std::pair<const char*, double> not_negative[] = {
      {"lr", options.lr},
      {"eps", options.eps},
      {"weight_decay", options.weight_decay},
      {"momentum", options.momentum},
      {"alpha", options.alpha},
      {"lr_decay", options.lr_decay},
      {"initial_accumulator_value", options.initial_accumulator_value}};
  for (const auto& [name, value] : not_negative) {
    if (value >= 0) continue;
    throw std::invalid_argument(concat(where, name, " is ", value, ", expected a number that is not negative"));
  }
  const std::pair<const char*, double> below_one[] = {{"beta1", options.beta1}, {"beta2", options.beta2}};
  for (const auto& [name, value] : below_one) {
    if (value >= 0 && value < 1) continue;
    throw std::invalid_argument(
        concat(where, name, " is ", value, ", expected a number from 0 up to but not including 1"));
  }
}

void require_in_range(const std::vector<Hyperparameters>& groups, const char* where) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string group = groups.size() > 1 ? concat("group ", i, ": ") : "";
    require_in_range(groups[i], concat("[", where, "] ", group));
  }
}

}  // namespace

UpdateRule::UpdateRule(Algorithm chosen) : algorithm(chosen), options(defaults_of(chosen)) {}

UpdateRule::UpdateRule(const torch::optim::AdamOptions& from) : UpdateRule(Algorithm::kAdam) {
  options = adam_options(options, from);
}

UpdateRule::UpdateRule(const torch::optim::AdamWOptions& from) : UpdateRule(Algorithm::kAdamW) {
  options = adam_options(options, from);
}

UpdateRule::UpdateRule(const torch::optim::SGDOptions& from) : UpdateRule(Algorithm::kSGD) {
  options.lr = from.lr();
  options.momentum = from.momentum();
  options.dampening = from.dampening();
  options.weight_decay = from.weight_decay();
  options.nesterov = from.nesterov();
}

UpdateRule::UpdateRule(const torch::optim::AdagradOptions& from) : UpdateRule(Algorithm::kAdagrad) {
  options.lr = from.lr();
  options.lr_decay = from.lr_decay();
  options.weight_decay = from.weight_decay();
  options.initial_accumulator_value = from.initial_accumulator_value();
  options.eps = from.eps();
}

UpdateRule::UpdateRule(const torch::optim::RMSpropOptions& from) : UpdateRule(Algorithm::kRMSprop) {
  options.lr = from.lr();
  options.alpha = from.alpha();
  options.eps = from.eps();
  options.weight_decay = from.weight_decay();
  options.momentum = from.momentum();
  options.centered = from.centered();
}

Optimizer::Optimizer(HostWeights& model, const UpdateRule& rule, const std::vector<ParameterGroup>& groups,
                     const OptimizerFormat& format)
    : algorithm_(rule.algorithm), moments_(format.moments) {
  for (const ParameterGroup& group : groups) options_.push_back(group.options);
  options_.push_back(rule.options);
  require_in_range(options_, "optimizer");
  // Refuses options that the rule or the format does not know.
  for (const Hyperparameters& options : options_) optim::state_names(rule.algorithm, options, format.moments, {1});

  std::vector<bool> used(options_.size(), false);
  const auto group_of = [&](const std::string& name, const at::Tensor& parameter) {
    const auto found = std::ranges::find_if(
        groups, [&](const ParameterGroup& group) { return group.holds && group.holds(name, parameter); });
    used[static_cast<size_t>(found - groups.begin())] = true;
    return static_cast<int>(found - groups.begin());
  };
  const auto accepted = [&] {
    for (size_t i = 0; i < groups.size(); ++i) {
      if (used[i]) continue;
      throw std::invalid_argument(concat("[optimizer] group ", i,
                                         " holds no trainable parameter that an earlier group "
                                         "does not hold, expected at least one; see Model::named_parameters"));
    }
  };
  core_ = model.bind(group_of, accepted, rule.algorithm, format.moments, format.gradients_in_fp32, format.nodes);
}

const std::shared_ptr<runtime::ModelOptimizer>& Optimizer::core() const {
  require_not_moved_from(core_ != nullptr, "optimizer");
  return core_;
}

const std::vector<Hyperparameters>& Optimizer::all_options() const {
  core();
  return options_;
}

Hyperparameters& Optimizer::options(size_t index) {
  core();
  return options_.at(index);
}

Hyperparameters& Optimizer::options() {
  core();
  return options_.back();
}

const std::vector<Hyperparameters>& Optimizer::options_of_step() const {
  require_in_range(all_options(), "step");
  return options_;
}

int64_t Optimizer::steps() const {
  core();
  return steps_;
}

void Optimizer::set_learning_rate(LearningRate factor) {
  core();
  factor_ = std::move(factor);
  first_rates_.clear();
  if (!factor_) return;
  for (const Hyperparameters& options : options_) first_rates_.push_back(options.lr);
  schedule();
}

void Optimizer::set_steps(int64_t steps) {
  core();
  steps_ = steps;
  schedule();
}

void Optimizer::restore(std::vector<Hyperparameters> options, std::vector<double> first_rates, int64_t steps) {
  options_ = std::move(options);
  if (factor_) first_rates_ = std::move(first_rates);
  set_steps(steps);
}

void Optimizer::count_step() {
  ++steps_;
  schedule();
}

void Optimizer::schedule() {
  if (!factor_) return;
  const double factor = factor_(steps_);
  for (size_t i = 0; i < options_.size(); ++i) options_[i].lr = first_rates_[i] * factor;
}

runtime::ModelOptimizer::HostBytes Optimizer::host_bytes() const { return core()->host_bytes(options_); }

}  // namespace roundpipe
