#include <roundpipe/api/optimizer.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <roundpipe/api/grad_scaler.h>
#include <roundpipe/api/joint_steps.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/runtime/model_optimizer.h>
#include <roundpipe/training/fused_steps.h>
#include <roundpipe/training/joint_training.h>
#include <roundpipe/training/scale_moves.h>

namespace roundpipe {

using optim::Algorithm;
using optim::Hyperparameters;

namespace {

template <typename Options>
Hyperparameters adam_options(Hyperparameters options, const Options& from) {
  options.lr = from.lr();
  std::tie(options.beta1, options.beta2) = from.betas();
  options.eps = from.eps();
  options.weight_decay = from.weight_decay();
  options.amsgrad = from.amsgrad();
  return options;
}

// Refuses values that torch.optim's constructors refuse.
void require_in_range(Algorithm algorithm, const std::vector<Hyperparameters>& groups, const char* where) {
  for (size_t i = 0; i < groups.size(); ++i) {
    const std::string group = groups.size() > 1 ? concat("group ", i, ": ") : "";
    optim::check(algorithm, groups[i], concat("[", where, "] ", group));
  }
}

}  // namespace

UpdateRule::UpdateRule(Algorithm chosen) : algorithm(chosen), options(optim::default_hyperparameters(chosen)) {}

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
    : Optimizer(SteppedWeights{{{"", &model}}}, rule, groups, format) {}

Optimizer::Optimizer(const SteppedWeights& stepped, const UpdateRule& rule, const std::vector<ParameterGroup>& groups,
                     const OptimizerFormat& format)
    : algorithm_(rule.algorithm), moments_(format.moments) {
  for (const ParameterGroup& group : groups) options_.push_back(group.options.over(rule.options));
  options_.push_back(rule.options);
  require_in_range(algorithm_, options_, "optimizer");
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
  fused_ = HostWeights::bind(stepped, group_of, accepted,
                             {rule.algorithm,
                              options_,
                              {format.moments, format.masters},
                              format.gradients_in_fp32,
                              format.disk,
                              format.gradients_at_once},
                             format.nodes);
  core_ = fused_->optimizer();
}

Optimizer& Optimizer::operator=(Optimizer&& other) noexcept { return move_into(*this, std::move(other)); }

const std::shared_ptr<runtime::ModelOptimizer>& Optimizer::core() const {
  require_not_moved_from(core_ != nullptr, "optimizer");
  return core_;
}

const std::shared_ptr<FusedSteps>& Optimizer::fused_steps() const {
  core();
  return fused_;
}

const std::vector<Hyperparameters>& Optimizer::all_options() const {
  core();
  return options_;
}

std::span<Hyperparameters> Optimizer::param_groups() {
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

void Optimizer::zero_grad() {
  core()->drop_gradients();
  if (fused_->joint()) fused_->joint()->counts()->forget();
}

Step Optimizer::step(const StepOptions& options) {
  const std::shared_ptr<cluster::Nodes>& nodes = core()->nodes();
  check(options, nodes != nullptr);
  require_in_range(algorithm_, options_, "step");
  // Now, so that a schedule that throws leaves everything as it was.
  const std::vector<double> next_rates = rates_after(steps_ + 1);
  require_latest("step");
  telling_failure(*fused_, [&] {
    HostWeights::refuse_late(fused_->late_parameter());
    fused_->prepare_step(options.asynchronous);
  });
  at::Tensor scale;
  if (options.scaler != nullptr) {
    if (nodes) options.scaler->started();
    scale = options.scaler->moves().begin_step(fused_->pipelines(), nodes != nullptr);
  }
  const double loss_scale = scale.defined() ? scale.item<double>() : 0.0;
  const StepOptions agreed = agree_on_step(*fused_, algorithm_, options_, options, loss_scale);
  const std::shared_ptr<runtime::StepRun> run = fused_->start_step(options_, agreed, loss_scale);
  ++steps_;
  set_rates(next_rates);
  if (options.scaler != nullptr) {
    ScaleMoves& moves = options.scaler->moves();
    moves.stepped(fused_->pipelines(), run, scale, options.scaler->rule());
    // The scale of the next losses depends on these gradients.
    if (!options.asynchronous) moves.settle(fused_->pipelines());
  }
  return Step(run);
}

double Optimizer::measure_gradients() {
  require_latest("measure_gradients");
  HostWeights::refuse_late(fused_->late_parameter());
  return fused_->measure_gradients();
}

void Optimizer::require_latest(const char* where) const {
  if (fused_steps()->optimizer() == core_) return;
  throw std::invalid_argument(
      concat("[", where, "] another optimizer was made for the same model since, expected that one to be used"));
}

int64_t Optimizer::steps() const {
  core();
  return steps_;
}

void Optimizer::set_learning_rate(LearningRate factor) {
  core();
  std::vector<double> first;
  if (factor) {
    for (const Hyperparameters& options : options_) first.push_back(options.lr);
  }
  const std::vector<double> rates = scheduled(first, factor, steps_);
  factor_ = std::move(factor);
  first_rates_ = std::move(first);
  set_rates(rates);
}

void Optimizer::set_steps(int64_t steps) {
  const std::vector<double> rates = rates_after(steps);
  steps_ = steps;
  set_rates(rates);
}

void Optimizer::restore(std::vector<Hyperparameters> options, std::vector<double> first_rates, int64_t steps) {
  core();
  if (!factor_) first_rates.clear();
  const std::vector<double> rates = scheduled(first_rates, factor_, steps);
  options_ = std::move(options);
  first_rates_ = std::move(first_rates);
  steps_ = steps;
  set_rates(rates);
}

std::vector<double> Optimizer::rates_after(int64_t steps) const {
  core();
  return scheduled(first_rates_, factor_, steps);
}

std::vector<double> Optimizer::scheduled(const std::vector<double>& first, const LearningRate& factor, int64_t steps) {
  if (!factor) return {};
  require_no_locks("a schedule of the learning rate");
  const double now = factor(steps);
  if (!(now >= 0)) {
    throw std::invalid_argument(concat("[learning rate] the schedule's factor of step ", steps, " is ", now,
                                       ", expected a number that is not negative"));
  }
  std::vector<double> rates;
  for (const double rate : first) rates.push_back(rate * now);
  return rates;
}

void Optimizer::set_rates(const std::vector<double>& rates) noexcept {
  for (size_t i = 0; i < rates.size(); ++i) options_[i].lr = rates[i];
}

}  // namespace roundpipe
