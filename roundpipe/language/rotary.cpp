#include <roundpipe/language/rotary.h>

#include <algorithm>
#include <cmath>
#include <numbers>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <roundpipe/models/rotary_tables.h>

namespace roundpipe::language {

using at::Tensor;

namespace {

// theta ^ (0, 2, 4, ... / head_dim)
Tensor frequencies_below(double theta, int64_t head_dim) {
  const Tensor exponents = at::arange(0, head_dim, 2, at::kLong).to(at::kFloat) / head_dim;
  return at::pow(theta, exponents);
}

// number / tensor, as Python divides.
Tensor over(double number, const Tensor& tensor) { return tensor.reciprocal() * number; }

Tensor default_frequencies(double theta, int64_t head_dim) { return over(1.0, frequencies_below(theta, head_dim)); }

Tensor llama3_frequencies(const RotaryConfig& rotary, int64_t head_dim) {
  const Tensor plain = default_frequencies(rotary.theta, head_dim);
  const auto context = static_cast<double>(rotary.original_max_positions);
  const double low_wave = context / rotary.low_freq_factor;
  const double high_wave = context / rotary.high_freq_factor;
  const Tensor waves = over(2 * std::numbers::pi, plain);
  const Tensor slowed = at::where(waves > low_wave, plain / rotary.factor, plain);
  const Tensor smooth =
      (over(context, waves) - rotary.low_freq_factor) / (rotary.high_freq_factor - rotary.low_freq_factor);
  const Tensor first = at::rsub(smooth, 1) * slowed / rotary.factor;
  const Tensor second = smooth * slowed;
  const Tensor between = (waves < high_wave).logical_not() * (waves > low_wave).logical_not();
  return at::where(between, first + second, slowed);
}

Tensor yarn_frequencies(const RotaryConfig& rotary, int64_t head_dim) {
  const auto dim = static_cast<double>(head_dim);
  const auto dimension_of = [&](double rotations) {
    return dim * std::log(static_cast<double>(rotary.original_max_positions) / (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(rotary.theta));
  };
  double low = dimension_of(rotary.beta_fast), high = dimension_of(rotary.beta_slow);
  if (rotary.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  const Tensor ramp = at::clamp((at::arange(head_dim / 2, at::kFloat) - low) / (high - low), 0, 1);
  const Tensor below = frequencies_below(rotary.theta, head_dim);
  const Tensor extrapolated = over(1.0, below);
  const Tensor interpolated = over(1.0, rotary.factor * below);
  const Tensor share = at::rsub(ramp, 1);
  const Tensor first = interpolated * at::rsub(share, 1);
  const Tensor second = extrapolated * share;
  return first + second;
}

double yarn_scaling(const RotaryConfig& rotary) {
  if (rotary.attention_factor) return *rotary.attention_factor;
  const auto scaling_of = [&](double scale) {
    return rotary.factor <= 1 ? 1.0 : 0.1 * scale * std::log(rotary.factor) + 1.0;
  };
  if (rotary.mscale != 0 && rotary.mscale_all_dim != 0) {
    return scaling_of(rotary.mscale) / scaling_of(rotary.mscale_all_dim);
  }
  return scaling_of(1);
}

Tensor frequencies_of(const RotaryConfig& rotary, int64_t head_dim) {
  switch (rotary.type) {
    case RotaryType::kDefault:
      break;
    case RotaryType::kLinear:
      return default_frequencies(rotary.theta, head_dim) / rotary.factor;
    case RotaryType::kDynamic: {
      // At the model's own length, which no row exceeds here.
      const double growth = rotary.factor - (rotary.factor - 1);
      const auto dim = static_cast<double>(head_dim);
      return default_frequencies(rotary.theta * std::pow(growth, dim / (dim - 2)), head_dim);
    }
    case RotaryType::kLlama3:
      return llama3_frequencies(rotary, head_dim);
    case RotaryType::kYarn:
      return yarn_frequencies(rotary, head_dim);
  }
  return default_frequencies(rotary.theta, head_dim);
}

}  // namespace

Rotary::Rotary(const Config& config) : halves_(config.rotary.halves) {
  const at::NoGradGuard no_grad;
  inverse_frequencies_ = frequencies_of(config.rotary, config.head_dim);
  if (config.rotary.type == RotaryType::kYarn) scaling_ = yarn_scaling(config.rotary);
}

std::pair<Tensor, Tensor> Rotary::cos_sin(const Tensor& positions, c10::ScalarType dtype) const {
  return models::rotary_tables(positions, inverse_frequencies_.to(positions.device()), scaling_, dtype, halves_);
}

}  // namespace roundpipe::language
