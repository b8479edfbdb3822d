#pragma once

#include <optional>
#include <string>

#include <roundpipe/optim/algorithm.h>

namespace roundpipe::optim {

// Some hyperparameters, under the same names; the others are those of the rule.
struct GivenHyperparameters {
  std::optional<double> lr = std::nullopt;
  std::optional<double> beta1 = std::nullopt;
  std::optional<double> beta2 = std::nullopt;
  std::optional<double> eps = std::nullopt;
  std::optional<double> eps2 = std::nullopt;
  std::optional<double> weight_decay = std::nullopt;
  std::optional<double> momentum = std::nullopt;
  std::optional<double> dampening = std::nullopt;
  std::optional<double> alpha = std::nullopt;
  std::optional<double> rho = std::nullopt;
  std::optional<double> lr_decay = std::nullopt;
  std::optional<double> momentum_decay = std::nullopt;
  std::optional<double> lambd = std::nullopt;
  std::optional<double> t0 = std::nullopt;
  std::optional<double> eta_minus = std::nullopt;
  std::optional<double> eta_plus = std::nullopt;
  std::optional<double> step_size_min = std::nullopt;
  std::optional<double> step_size_max = std::nullopt;
  std::optional<double> beta2_decay = std::nullopt;
  std::optional<double> clip_threshold = std::nullopt;
  std::optional<double> initial_accumulator_value = std::nullopt;
  std::optional<double> ns_a = std::nullopt;
  std::optional<double> ns_b = std::nullopt;
  std::optional<double> ns_c = std::nullopt;
  std::optional<double> ns_steps = std::nullopt;
  std::optional<bool> nesterov = std::nullopt;
  std::optional<bool> amsgrad = std::nullopt;
  std::optional<bool> maximize = std::nullopt;
  std::optional<bool> centered = std::nullopt;
  std::optional<bool> decoupled_weight_decay = std::nullopt;
  std::optional<bool> match_rms_adamw = std::nullopt;
  std::optional<bool> use_muon = std::nullopt;

  // These, and those of `rule` in place of the ones that are not given.
  Hyperparameters over(const Hyperparameters& rule) const;
};

// What the constructors of torch.optim have by default (Lion: those of its authors).
Hyperparameters default_hyperparameters(Algorithm algorithm);

// Throws std::invalid_argument for what the constructors of torch.optim refuse of this algorithm, and for NaN. `where`
// begins the message: "[step] group 1: ".
void check(Algorithm algorithm, const Hyperparameters& hyper, const std::string& where);

}  // namespace roundpipe::optim
