#include <roundpipe/optim/coefficients.h>

#include <algorithm>
#include <cmath>

namespace roundpipe::optim {
namespace {

void set_moments(Coefficients& k, const Hyperparameters& hyper) {
  k.first = interpolation(1 - hyper.beta1);
  k.second_decay = static_cast<float>(hyper.beta2);
  k.second_weight = static_cast<float>(1 - hyper.beta2);
}

void set_adam(Coefficients& k, const Hyperparameters& hyper, double step) {
  set_moments(k, hyper);
  k.amsgrad = hyper.amsgrad;
  k.second_divisor = static_cast<float>(std::pow(1 - std::pow(hyper.beta2, step), 0.5));
  k.rate = static_cast<float>(-(hyper.lr / (1 - std::pow(hyper.beta1, step))));
}

void set_sgd(Coefficients& k, const Hyperparameters& hyper, double step) {
  k.has_momentum = hyper.momentum != 0;
  k.nesterov = hyper.nesterov;
  k.first_step = step == 1;
  k.momentum = static_cast<float>(hyper.momentum);
  k.momentum_weight = static_cast<float>(1 - hyper.dampening);
  k.rate = static_cast<float>(-hyper.lr);
}

void set_nadam(Coefficients& k, const Hyperparameters& hyper, Scalars& scalars) {
  set_moments(k, hyper);
  const double step = scalars.step;
  const double mu = hyper.beta1 * (1.0 - 0.5 * std::pow(0.96, step * hyper.momentum_decay));
  const double mu_next = hyper.beta1 * (1.0 - 0.5 * std::pow(0.96, (step + 1) * hyper.momentum_decay));
  // torch keeps the product as an fp32 tensor.
  scalars.mu_product = static_cast<float>(scalars.mu_product) * static_cast<float>(mu);
  k.second_divisor = static_cast<float>(1 - std::pow(hyper.beta2, step));
  k.rate = static_cast<float>(-hyper.lr * (1.0 - mu) / (1.0 - scalars.mu_product));
  k.second_rate = static_cast<float>((-hyper.lr * mu_next) / (1.0 - scalars.mu_product * mu_next));
}

void set_radam(Coefficients& k, const Hyperparameters& hyper, double step) {
  set_moments(k, hyper);
  const double correction2 = 1 - std::pow(hyper.beta2, step);
  const double rho_inf = 2 / (1 - hyper.beta2) - 1;
  const double rho = rho_inf - 2 * step * std::pow(hyper.beta2, step) / correction2;
  k.first_divisor = static_cast<float>(1 - std::pow(hyper.beta1, step));
  k.rate = static_cast<float>(hyper.lr);
  k.rectified = rho > 5.0;
  if (k.rectified) {
    k.second_divisor = static_cast<float>(std::pow(correction2, 0.5));
    k.rectification =
        static_cast<float>(std::pow((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho), 0.5));
  }
}

void set_rmsprop(Coefficients& k, const Hyperparameters& hyper) {
  k.centered = hyper.centered;
  k.has_momentum = hyper.momentum > 0;
  k.momentum = static_cast<float>(hyper.momentum);
  k.first = interpolation(1 - hyper.alpha);
  k.second_decay = static_cast<float>(hyper.alpha);
  k.second_weight = static_cast<float>(1 - hyper.alpha);
  k.rate = static_cast<float>(-hyper.lr);
}

void set_rprop(Coefficients& k, const Hyperparameters& hyper) {
  k.eta_minus = static_cast<float>(hyper.eta_minus);
  k.eta_plus = static_cast<float>(hyper.eta_plus);
  k.step_size_min = static_cast<float>(hyper.step_size_min);
  k.step_size_max = static_cast<float>(hyper.step_size_max);
}

void set_asgd(Coefficients& k, const Hyperparameters& hyper, Scalars& scalars) {
  // torch keeps eta and mu as fp32 tensors.
  if (scalars.step == 1) scalars.eta = static_cast<float>(hyper.lr);
  k.decay = static_cast<float>(1 - hyper.lambd * scalars.eta);
  k.rate = static_cast<float>(-scalars.eta);
  k.averages = scalars.mu != 1;
  k.mu = static_cast<float>(scalars.mu);
  scalars.eta = static_cast<float>(hyper.lr / std::pow(1 + hyper.lambd * hyper.lr * scalars.step, hyper.alpha));
  scalars.mu = static_cast<float>(1 / std::max(1.0, scalars.step - hyper.t0));
}

void set_lion(Coefficients& k, const Hyperparameters& hyper) {
  k.momentum = static_cast<float>(hyper.beta1);
  k.momentum_weight = static_cast<float>(1 - hyper.beta1);
  k.second_decay = static_cast<float>(hyper.beta2);
  k.second_weight = static_cast<float>(1 - hyper.beta2);
  k.rate = static_cast<float>(-hyper.lr);
}

bool decays_decoupled(Algorithm algorithm, const Hyperparameters& hyper) {
  switch (algorithm) {
    case Algorithm::kAdamW:
    case Algorithm::kLion:
      return true;
    case Algorithm::kAdam:
    case Algorithm::kNAdam:
    case Algorithm::kRAdam:
      return hyper.decoupled_weight_decay;
    case Algorithm::kSGD:
    case Algorithm::kAdagrad:
    case Algorithm::kAdadelta:
    case Algorithm::kAdamax:
    case Algorithm::kRMSprop:
    case Algorithm::kRprop:
    case Algorithm::kASGD:
    case Algorithm::kAdafactor:
    case Algorithm::kMuon:
      return false;
  }
  return false;
}

}  // namespace

Interpolation interpolation(double weight_fp64) {
  const auto weight = static_cast<float>(weight_fp64);
  if (std::abs(weight) < 0.5F) return {weight, false};
  return {weight - 1.0F, true};
}

Coefficients advance(Algorithm algorithm, const Hyperparameters& hyper, Scalars& scalars) {
  scalars.step += 1;
  Coefficients k;
  k.algorithm = algorithm;
  k.maximize = hyper.maximize;
  k.eps = static_cast<float>(hyper.eps);
  k.dither_seed = static_cast<uint32_t>(static_cast<uint64_t>(scalars.step));
  if (decays_decoupled(algorithm, hyper)) {
    k.decay = static_cast<float>(1 - hyper.lr * hyper.weight_decay);
  } else if (algorithm != Algorithm::kRprop) {
    k.weight_decay = static_cast<float>(hyper.weight_decay);
  }
  switch (algorithm) {
    case Algorithm::kAdam:
    case Algorithm::kAdamW:
      set_adam(k, hyper, scalars.step);
      break;
    case Algorithm::kSGD:
      set_sgd(k, hyper, scalars.step);
      break;
    case Algorithm::kAdagrad:
      k.rate = static_cast<float>(-(hyper.lr / (1 + (scalars.step - 1) * hyper.lr_decay)));
      break;
    case Algorithm::kAdadelta:
      k.second_decay = static_cast<float>(hyper.rho);
      k.second_weight = static_cast<float>(1 - hyper.rho);
      k.rate = static_cast<float>(-hyper.lr);
      break;
    case Algorithm::kAdamax:
      set_moments(k, hyper);
      k.rate = static_cast<float>(-(hyper.lr / (1 - std::pow(hyper.beta1, scalars.step))));
      break;
    case Algorithm::kNAdam:
      set_nadam(k, hyper, scalars);
      break;
    case Algorithm::kRAdam:
      set_radam(k, hyper, scalars.step);
      break;
    case Algorithm::kRMSprop:
      set_rmsprop(k, hyper);
      break;
    case Algorithm::kRprop:
      set_rprop(k, hyper);
      break;
    case Algorithm::kASGD:
      set_asgd(k, hyper, scalars);
      break;
    case Algorithm::kLion:
      set_lion(k, hyper);
      break;
    case Algorithm::kAdafactor:
    case Algorithm::kMuon:
      break;
  }
  return k;
}

}  // namespace roundpipe::optim
