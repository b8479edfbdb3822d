#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include <roundpipe/optim/algorithm.h>

// Every algorithm once more, slowly: element by element, one function each, following torch.optim's single-tensor code.
// Scalars are fp64 until torch passes them to an fp32 tensor operation. `add` fuses as torch does on CPUs with FMA.
namespace reference {

using roundpipe::optim::Algorithm;
using roundpipe::optim::Hyperparameters;

inline float f32(double value) { return static_cast<float>(value); }
inline float add(float a, float b, double alpha) { return std::fma(f32(alpha), b, a); }
inline float addcmul(float a, float b, float c, double value) { return std::fma(f32(value) * b, c, a); }
inline float addcdiv(float a, float b, float c, double value) { return a + f32(value) * b / c; }
inline float lerp(float a, float b, double weight) {
  const float w = f32(weight);
  return std::abs(w) < 0.5F ? std::fma(w, b - a, a) : std::fma(w - 1, b - a, b);
}
inline float max_or_nan(float a, float b) { return std::isnan(a) || std::isnan(b) ? NAN : std::fmax(a, b); }
inline float sign(float value) { return value > 0 ? 1.0F : value < 0 ? -1.0F : 0.0F; }

// One element and its optimizer state.
struct Element {
  float p = 0;
  float s[3] = {};  // in the order of state_names
  double mu_product = 1, eta = 0, mu = 1;
};

inline void adam(const Hyperparameters& h, Element& e, float g, double t, bool decoupled) {
  if (h.weight_decay != 0) {
    if (decoupled) {
      e.p *= f32(1 - h.lr * h.weight_decay);
    } else {
      g = add(g, e.p, h.weight_decay);
    }
  }
  e.s[0] = lerp(e.s[0], g, 1 - h.beta1);
  e.s[1] = addcmul(e.s[1] * f32(h.beta2), g, g, 1 - h.beta2);
  float v = e.s[1];
  if (h.amsgrad) v = e.s[2] = max_or_nan(e.s[2], v);
  const float denominator = std::sqrt(v) / f32(std::pow(1 - std::pow(h.beta2, t), 0.5)) + f32(h.eps);
  e.p = addcdiv(e.p, e.s[0], denominator, -(h.lr / (1 - std::pow(h.beta1, t))));
}

inline void sgd(const Hyperparameters& h, Element& e, float g, double t) {
  if (h.weight_decay != 0) g = add(g, e.p, h.weight_decay);
  if (h.momentum != 0) {
    e.s[0] = t == 1 ? g : add(e.s[0] * f32(h.momentum), g, 1 - h.dampening);
    g = h.nesterov ? add(g, e.s[0], h.momentum) : e.s[0];
  }
  e.p = add(e.p, g, -h.lr);
}

inline void adagrad(const Hyperparameters& h, Element& e, float g, double t) {
  if (h.weight_decay != 0) g = add(g, e.p, h.weight_decay);
  e.s[0] = addcmul(e.s[0], g, g, 1);
  e.p = addcdiv(e.p, g, std::sqrt(e.s[0]) + f32(h.eps), -(h.lr / (1 + (t - 1) * h.lr_decay)));
}

inline void adadelta(const Hyperparameters& h, Element& e, float g) {
  if (h.weight_decay != 0) g = add(g, e.p, h.weight_decay);
  e.s[0] = addcmul(e.s[0] * f32(h.rho), g, g, 1 - h.rho);
  const float delta = std::sqrt(e.s[1] + f32(h.eps)) / std::sqrt(e.s[0] + f32(h.eps)) * g;
  e.s[1] = addcmul(e.s[1] * f32(h.rho), delta, delta, 1 - h.rho);
  e.p = add(e.p, delta, -h.lr);
}

inline void adamax(const Hyperparameters& h, Element& e, float g, double t) {
  if (h.weight_decay != 0) g = add(g, e.p, h.weight_decay);
  e.s[0] = lerp(e.s[0], g, 1 - h.beta1);
  e.s[1] = max_or_nan(e.s[1] * f32(h.beta2), std::abs(g) + f32(h.eps));
  e.p = addcdiv(e.p, e.s[0], e.s[1], -(h.lr / (1 - std::pow(h.beta1, t))));
}

inline void nadam(const Hyperparameters& h, Element& e, float g, double t) {
  if (h.weight_decay != 0) {
    if (h.decoupled_weight_decay) {
      e.p *= f32(1 - h.lr * h.weight_decay);
    } else {
      g = add(g, e.p, h.weight_decay);
    }
  }
  const double mu = h.beta1 * (1.0 - 0.5 * std::pow(0.96, t * h.momentum_decay));
  const double mu_next = h.beta1 * (1.0 - 0.5 * std::pow(0.96, (t + 1) * h.momentum_decay));
  e.mu_product = f32(e.mu_product) * f32(mu);
  e.s[0] = lerp(e.s[0], g, 1 - h.beta1);
  e.s[1] = addcmul(e.s[1] * f32(h.beta2), g, g, 1 - h.beta2);
  const float denominator = std::sqrt(e.s[1] / f32(1 - std::pow(h.beta2, t))) + f32(h.eps);
  e.p = addcdiv(e.p, g, denominator, -h.lr * (1.0 - mu) / (1.0 - e.mu_product));
  e.p = addcdiv(e.p, e.s[0], denominator, -h.lr * mu_next / (1.0 - e.mu_product * mu_next));
}

inline void radam(const Hyperparameters& h, Element& e, float g, double t) {
  if (h.weight_decay != 0) {
    if (h.decoupled_weight_decay) {
      e.p *= f32(1 - h.lr * h.weight_decay);
    } else {
      g = add(g, e.p, h.weight_decay);
    }
  }
  e.s[0] = lerp(e.s[0], g, 1 - h.beta1);
  e.s[1] = addcmul(e.s[1] * f32(h.beta2), g, g, 1 - h.beta2);
  const double correction2 = 1 - std::pow(h.beta2, t);
  const double rho_inf = 2 / (1 - h.beta2) - 1;
  const double rho = rho_inf - 2 * t * std::pow(h.beta2, t) / correction2;
  float update = e.s[0] / f32(1 - std::pow(h.beta1, t)) * f32(h.lr);
  if (rho > 5) {
    const double rectification = std::pow((rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho), 0.5);
    update *= f32(std::pow(correction2, 0.5)) * (1 / (std::sqrt(e.s[1]) + f32(h.eps)));
    update *= f32(rectification);
  }
  e.p = add(e.p, update, -1);
}

inline void rmsprop(const Hyperparameters& h, Element& e, float g) {
  if (h.weight_decay != 0) g = add(g, e.p, h.weight_decay);
  e.s[0] = addcmul(e.s[0] * f32(h.alpha), g, g, 1 - h.alpha);
  float average = e.s[0];
  if (h.centered) {
    float& grad_avg = e.s[h.momentum > 0 ? 2 : 1];
    grad_avg = lerp(grad_avg, g, 1 - h.alpha);
    average = addcmul(average, grad_avg, grad_avg, -1);
  }
  average = std::sqrt(average) + f32(h.eps);
  if (h.momentum > 0) {
    e.s[1] = addcdiv(e.s[1] * f32(h.momentum), g, average, 1);
    e.p = add(e.p, e.s[1], -h.lr);
  } else {
    e.p = addcdiv(e.p, g, average, -h.lr);
  }
}

inline void rprop(const Hyperparameters& h, Element& e, float g, double t) {
  if (t == 1) e.s[1] = f32(h.lr);
  const float agreement = sign(g * e.s[0]);
  const float factor = agreement > 0 ? f32(h.eta_plus) : agreement < 0 ? f32(h.eta_minus) : 1.0F;
  e.s[1] *= factor;
  if (e.s[1] < f32(h.step_size_min)) e.s[1] = f32(h.step_size_min);
  if (e.s[1] > f32(h.step_size_max)) e.s[1] = f32(h.step_size_max);
  if (agreement < 0) g = 0;
  e.p = addcmul(e.p, sign(g), e.s[1], -1);
  e.s[0] = g;
}

inline void asgd(const Hyperparameters& h, Element& e, float g, double t) {
  if (t == 1) e.eta = f32(h.lr);
  if (h.weight_decay != 0) g = add(g, e.p, h.weight_decay);
  e.p *= f32(1 - h.lambd * e.eta);
  e.p = add(e.p, g, -e.eta);
  e.s[0] = e.mu == 1 ? e.p : e.s[0] + (e.p - e.s[0]) * f32(e.mu);
  e.eta = f32(h.lr / std::pow(1 + h.lambd * h.lr * t, h.alpha));
  e.mu = f32(1 / std::fmax(1, t - h.t0));
}

inline void lion(const Hyperparameters& h, Element& e, float g) {
  if (h.weight_decay != 0) e.p *= f32(1 - h.lr * h.weight_decay);
  const float update = add(e.s[0] * f32(h.beta1), g, 1 - h.beta1);
  e.p = add(e.p, sign(update), -h.lr);
  e.s[0] = add(e.s[0] * f32(h.beta2), g, 1 - h.beta2);
}

// Step `t`, from 1, with a gradient that is already scaled.
inline void step(Algorithm algorithm, const Hyperparameters& h, Element& e, float g, double t) {
  if (h.maximize) g = -g;
  switch (algorithm) {
    case Algorithm::kAdam:
      return adam(h, e, g, t, h.decoupled_weight_decay);
    case Algorithm::kAdamW:
      return adam(h, e, g, t, true);
    case Algorithm::kSGD:
      return sgd(h, e, g, t);
    case Algorithm::kAdagrad:
      if (t == 1) e.s[0] = f32(h.initial_accumulator_value);
      return adagrad(h, e, g, t);
    case Algorithm::kAdadelta:
      return adadelta(h, e, g);
    case Algorithm::kAdamax:
      return adamax(h, e, g, t);
    case Algorithm::kNAdam:
      return nadam(h, e, g, t);
    case Algorithm::kRAdam:
      return radam(h, e, g, t);
    case Algorithm::kRMSprop:
      return rmsprop(h, e, g);
    case Algorithm::kRprop:
      return rprop(h, e, g, t);
    case Algorithm::kASGD:
      return asgd(h, e, g, t);
    case Algorithm::kLion:
      return lion(h, e, g);
    case Algorithm::kAdafactor:
    case Algorithm::kMuon:
      return;  // not elementwise, see adafactor_test.cpp and muon_test.cpp
  }
}

}  // namespace reference
