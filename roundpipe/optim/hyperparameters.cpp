#include <roundpipe/optim/hyperparameters.h>

#include <cmath>
#include <limits>
#include <stdexcept>
#include <tuple>

#include <roundpipe/core/error.h>

namespace roundpipe::optim {

namespace {

template <typename T>
using Member = std::tuple<const char*, T Hyperparameters::*, std::optional<T> GivenHyperparameters::*>;

// Calls `visit` with the name and the two members of each hyperparameter.
template <typename Visit>
void visit_all(const Visit& visit) {
  using All = Hyperparameters;
  using Given = GivenHyperparameters;
  for (const auto& [name, all, given] : {
           Member<double>{"lr", &All::lr, &Given::lr},
           Member<double>{"beta1", &All::beta1, &Given::beta1},
           Member<double>{"beta2", &All::beta2, &Given::beta2},
           Member<double>{"eps", &All::eps, &Given::eps},
           Member<double>{"eps2", &All::eps2, &Given::eps2},
           Member<double>{"weight_decay", &All::weight_decay, &Given::weight_decay},
           Member<double>{"momentum", &All::momentum, &Given::momentum},
           Member<double>{"dampening", &All::dampening, &Given::dampening},
           Member<double>{"alpha", &All::alpha, &Given::alpha},
           Member<double>{"rho", &All::rho, &Given::rho},
           Member<double>{"lr_decay", &All::lr_decay, &Given::lr_decay},
           Member<double>{"momentum_decay", &All::momentum_decay, &Given::momentum_decay},
           Member<double>{"lambd", &All::lambd, &Given::lambd},
           Member<double>{"t0", &All::t0, &Given::t0},
           Member<double>{"eta_minus", &All::eta_minus, &Given::eta_minus},
           Member<double>{"eta_plus", &All::eta_plus, &Given::eta_plus},
           Member<double>{"step_size_min", &All::step_size_min, &Given::step_size_min},
           Member<double>{"step_size_max", &All::step_size_max, &Given::step_size_max},
           Member<double>{"beta2_decay", &All::beta2_decay, &Given::beta2_decay},
           Member<double>{"clip_threshold", &All::clip_threshold, &Given::clip_threshold},
           Member<double>{"initial_accumulator_value", &All::initial_accumulator_value,
                          &Given::initial_accumulator_value},
           Member<double>{"ns_a", &All::ns_a, &Given::ns_a},
           Member<double>{"ns_b", &All::ns_b, &Given::ns_b},
           Member<double>{"ns_c", &All::ns_c, &Given::ns_c},
           Member<double>{"ns_steps", &All::ns_steps, &Given::ns_steps},
       }) {
    visit(name, all, given);
  }
  for (const auto& [name, all, given] : {
           Member<bool>{"nesterov", &All::nesterov, &Given::nesterov},
           Member<bool>{"amsgrad", &All::amsgrad, &Given::amsgrad},
           Member<bool>{"maximize", &All::maximize, &Given::maximize},
           Member<bool>{"centered", &All::centered, &Given::centered},
           Member<bool>{"decoupled_weight_decay", &All::decoupled_weight_decay, &Given::decoupled_weight_decay},
           Member<bool>{"match_rms_adamw", &All::match_rms_adamw, &Given::match_rms_adamw},
           Member<bool>{"use_muon", &All::use_muon, &Given::use_muon},
       }) {
    visit(name, all, given);
  }
}

}  // namespace

Hyperparameters::operator GivenHyperparameters() const {
  GivenHyperparameters copied;
  visit_all([&](const char*, auto all, auto given) { copied.*given = this->*all; });
  return copied;
}

Hyperparameters GivenHyperparameters::over(const Hyperparameters& rule) const {
  Hyperparameters made = rule;
  visit_all([&](const char*, auto all, auto given) {
    if (this->*given) made.*all = *(this->*given);
  });
  // AdamW's own eps, where Muon's stands in the rule.
  if (use_muon == false && rule.use_muon && !eps) made.eps = Hyperparameters().eps;
  return made;
}

Hyperparameters default_hyperparameters(Algorithm algorithm) {
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
    case Algorithm::kMuon:
      options.momentum = 0.95;
      options.nesterov = true;
      options.weight_decay = 0.1;
      options.eps = 1e-7;
      break;
    case Algorithm::kAdam:
    case Algorithm::kSGD:
    case Algorithm::kRAdam:
      break;
  }
  return options;
}

void check(Algorithm algorithm, const Hyperparameters& hyper, const std::string& where) {
  const auto require = [&](bool holds, const char* name, double value, const char* expected) {
    if (holds) return;
    throw std::invalid_argument(concat(where, name, " is ", value, ", expected ", expected));
  };
  visit_all([&](const char* name, auto all, auto) {
    require(!std::isnan(static_cast<double>(hyper.*all)), name, std::nan(""), "a number");
  });
  constexpr auto kNotNegative = "a number that is not negative";
  require(hyper.lr >= 0, "lr", hyper.lr, kNotNegative);
  require(hyper.eps >= 0, "eps", hyper.eps, kNotNegative);
  require(hyper.eps2 >= 0, "eps2", hyper.eps2, kNotNegative);
  require(hyper.weight_decay >= 0, "weight_decay", hyper.weight_decay, kNotNegative);
  require(hyper.momentum >= 0, "momentum", hyper.momentum, kNotNegative);
  require(hyper.alpha >= 0, "alpha", hyper.alpha, kNotNegative);
  require(hyper.lr_decay >= 0, "lr_decay", hyper.lr_decay, kNotNegative);
  require(hyper.momentum_decay >= 0, "momentum_decay", hyper.momentum_decay, kNotNegative);
  require(hyper.initial_accumulator_value >= 0, "initial_accumulator_value", hyper.initial_accumulator_value,
          kNotNegative);
  constexpr auto kBelowOne = "a number from 0 up to but not including 1";
  require(hyper.beta1 >= 0 && hyper.beta1 < 1, "beta1", hyper.beta1, kBelowOne);
  require(hyper.beta2 >= 0 && hyper.beta2 < 1, "beta2", hyper.beta2, kBelowOne);
  require(hyper.rho >= 0 && hyper.rho <= 1, "rho", hyper.rho, "a number from 0 to 1");
  require(hyper.eta_minus > 0 && hyper.eta_minus < 1, "eta_minus", hyper.eta_minus, "a number between 0 and 1");
  require(hyper.eta_plus > 1, "eta_plus", hyper.eta_plus, "more than 1");
  require(hyper.beta2_decay <= 0, "beta2_decay", hyper.beta2_decay, "a number that is not positive");
  require(hyper.clip_threshold >= 1, "clip_threshold", hyper.clip_threshold, "at least 1");
  require(hyper.ns_steps >= 0 && hyper.ns_steps < 100 && hyper.ns_steps == std::floor(hyper.ns_steps), "ns_steps",
          hyper.ns_steps, "a whole number from 0 to 99");
  if (algorithm == Algorithm::kMuon && (hyper.maximize || hyper.amsgrad)) {
    throw std::invalid_argument(concat(where, hyper.maximize ? "maximize" : "amsgrad",
                                       " is on, expected it off, since torch.optim.Muon has no such option"));
  }
  if (algorithm == Algorithm::kSGD && hyper.nesterov && !(hyper.momentum > 0 && hyper.dampening == 0)) {
    throw std::invalid_argument(concat(where, "nesterov is on with a momentum of ", hyper.momentum,
                                       " and a dampening of ", hyper.dampening,
                                       ", expected a positive momentum and no dampening, as torch.optim.SGD does"));
  }
}

}  // namespace roundpipe::optim
