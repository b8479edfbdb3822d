// The algorithms. Each makes one step of `count` elements: g is the gradient, p the weights, then come the states. Part
// of kernels.inl.
// Coefficients are passed by value, so that no store can alias them and they stay in registers.
// Operations are fused and ordered as torch does it on processors with fused multiply-add.

inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

inline float interpolate(Interpolation to, float start, float end) {
  return fused(to.coefficient, end - start, to.from_end ? end : start);
}

inline float decayed_square(const Coefficients& k, float average, float value) {
  return fused(k.second_weight * value, value, average * k.second_decay);
}

// NaN if either argument is.
inline float maximum(float a, float b) { return a > b || a != a ? a : b; }

inline float sign(float value) { return static_cast<float>(value > 0) - static_cast<float>(value < 0); }

using Chunk = float* __restrict;
using Values = const float* __restrict;

void adam(Coefficients k, Values g, Chunk p, Chunk exp_avg, Chunk exp_avg_sq, Chunk, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float average = interpolate(k.first, exp_avg[i], g[i]);
    const float square = decayed_square(k, exp_avg_sq[i], g[i]);
    exp_avg[i] = average;
    exp_avg_sq[i] = square;
    p[i] += k.rate * average / (__builtin_sqrtf(square) / k.second_divisor + k.eps);
  }
}

void adam_amsgrad(Coefficients k, Values g, Chunk p, Chunk exp_avg, Chunk exp_avg_sq, Chunk max_exp_avg_sq,
                  int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float average = interpolate(k.first, exp_avg[i], g[i]);
    const float square = decayed_square(k, exp_avg_sq[i], g[i]);
    const float largest = maximum(max_exp_avg_sq[i], square);
    exp_avg[i] = average;
    exp_avg_sq[i] = square;
    max_exp_avg_sq[i] = largest;
    p[i] += k.rate * average / (__builtin_sqrtf(largest) / k.second_divisor + k.eps);
  }
}

void sgd(Coefficients k, Values g, Chunk p, Chunk, Chunk, Chunk, int64_t count) {
  for (int64_t i = 0; i < count; ++i) p[i] = fused(k.rate, g[i], p[i]);
}

void sgd_momentum(Coefficients k, Values g, Chunk p, Chunk buffer, Chunk, Chunk, int64_t count) {
  if (k.first_step) {
    for (int64_t i = 0; i < count; ++i) buffer[i] = g[i];
  } else {
    for (int64_t i = 0; i < count; ++i) buffer[i] = fused(k.momentum_weight, g[i], buffer[i] * k.momentum);
  }
  if (k.nesterov) {
    for (int64_t i = 0; i < count; ++i) p[i] = fused(k.rate, fused(k.momentum, buffer[i], g[i]), p[i]);
  } else {
    for (int64_t i = 0; i < count; ++i) p[i] = fused(k.rate, buffer[i], p[i]);
  }
}

void adagrad(Coefficients k, Values g, Chunk p, Chunk sum, Chunk, Chunk, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float total = fused(g[i], g[i], sum[i]);
    sum[i] = total;
    p[i] += k.rate * g[i] / (__builtin_sqrtf(total) + k.eps);
  }
}

void adadelta(Coefficients k, Values g, Chunk p, Chunk square_avg, Chunk acc_delta, Chunk, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float square = decayed_square(k, square_avg[i], g[i]);
    const float delta = __builtin_sqrtf(acc_delta[i] + k.eps) / __builtin_sqrtf(square + k.eps) * g[i];
    square_avg[i] = square;
    acc_delta[i] = decayed_square(k, acc_delta[i], delta);
    p[i] = fused(k.rate, delta, p[i]);
  }
}

void adamax(Coefficients k, Values g, Chunk p, Chunk exp_avg, Chunk exp_inf, Chunk, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float average = interpolate(k.first, exp_avg[i], g[i]);
    const float norm = maximum(exp_inf[i] * k.second_decay, __builtin_fabsf(g[i]) + k.eps);
    exp_avg[i] = average;
    exp_inf[i] = norm;
    p[i] += k.rate * average / norm;
  }
}

void nadam(Coefficients k, Values g, Chunk p, Chunk exp_avg, Chunk exp_avg_sq, Chunk, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float average = interpolate(k.first, exp_avg[i], g[i]);
    const float square = decayed_square(k, exp_avg_sq[i], g[i]);
    const float denominator = __builtin_sqrtf(square / k.second_divisor) + k.eps;
    exp_avg[i] = average;
    exp_avg_sq[i] = square;
    p[i] = p[i] + k.rate * g[i] / denominator + k.second_rate * average / denominator;
  }
}

void radam(Coefficients k, Values g, Chunk p, Chunk exp_avg, Chunk exp_avg_sq, Chunk, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    exp_avg[i] = interpolate(k.first, exp_avg[i], g[i]);
    exp_avg_sq[i] = decayed_square(k, exp_avg_sq[i], g[i]);
  }
  if (k.rectified) {
    for (int64_t i = 0; i < count; ++i) {
      const float adaptive = k.second_divisor * (1.0F / (__builtin_sqrtf(exp_avg_sq[i]) + k.eps));
      p[i] -= exp_avg[i] / k.first_divisor * k.rate * adaptive * k.rectification;
    }
  } else {
    for (int64_t i = 0; i < count; ++i) p[i] -= exp_avg[i] / k.first_divisor * k.rate;
  }
}

// With momentum, `s1` is momentum_buffer and `s2` is grad_avg; without, `s1` is grad_avg.
void rmsprop(Coefficients k, Values g, Chunk p, Chunk square_avg, Chunk s1, Chunk s2, int64_t count) {
  alignas(64) float divisor[kChunk];
  for (int64_t i = 0; i < count; ++i) divisor[i] = square_avg[i] = decayed_square(k, square_avg[i], g[i]);
  if (k.centered) {
    const Chunk grad_avg = k.has_momentum ? s2 : s1;
    for (int64_t i = 0; i < count; ++i) {
      grad_avg[i] = interpolate(k.first, grad_avg[i], g[i]);
      divisor[i] = fused(-grad_avg[i], grad_avg[i], divisor[i]);
    }
  }
  for (int64_t i = 0; i < count; ++i) divisor[i] = __builtin_sqrtf(divisor[i]) + k.eps;
  if (k.has_momentum) {
    for (int64_t i = 0; i < count; ++i) {
      s1[i] = s1[i] * k.momentum + g[i] / divisor[i];
      p[i] = fused(k.rate, s1[i], p[i]);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) p[i] += k.rate * g[i] / divisor[i];
  }
}

void rprop(Coefficients k, Values g, Chunk p, Chunk previous, Chunk step_size, Chunk, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float agreement = g[i] * previous[i];
    float factor = agreement < 0 ? k.eta_minus : 1.0F;
    factor = agreement > 0 ? k.eta_plus : factor;
    float size = step_size[i] * factor;
    size = size < k.step_size_min ? k.step_size_min : size;
    size = size > k.step_size_max ? k.step_size_max : size;
    const float kept = agreement < 0 ? 0.0F : g[i];
    step_size[i] = size;
    previous[i] = kept;
    p[i] = fused(-sign(kept), size, p[i]);
  }
}

void asgd(Coefficients k, Values g, Chunk p, Chunk ax, Chunk, Chunk, int64_t count) {
  for (int64_t i = 0; i < count; ++i) p[i] = fused(k.rate, g[i], p[i]);
  if (k.averages) {
    for (int64_t i = 0; i < count; ++i) ax[i] += (p[i] - ax[i]) * k.mu;
  } else {
    for (int64_t i = 0; i < count; ++i) ax[i] = p[i];
  }
}

void lion(Coefficients k, Values g, Chunk p, Chunk exp_avg, Chunk, Chunk, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    const float update = fused(k.momentum_weight, g[i], exp_avg[i] * k.momentum);
    exp_avg[i] = fused(k.second_weight, g[i], exp_avg[i] * k.second_decay);
    p[i] = fused(k.rate, sign(update), p[i]);
  }
}

using Rule = void (*)(Coefficients, Values, Chunk, Chunk, Chunk, Chunk, int64_t);

// Null for Adafactor and Muon, which need several passes.
inline Rule rule_of(const Coefficients& k) {
  switch (k.algorithm) {
    case Algorithm::kAdam:
    case Algorithm::kAdamW:
      return k.amsgrad ? adam_amsgrad : adam;
    case Algorithm::kSGD:
      return k.has_momentum ? sgd_momentum : sgd;
    case Algorithm::kAdagrad:
      return adagrad;
    case Algorithm::kAdadelta:
      return adadelta;
    case Algorithm::kAdamax:
      return adamax;
    case Algorithm::kNAdam:
      return nadam;
    case Algorithm::kRAdam:
      return radam;
    case Algorithm::kRMSprop:
      return rmsprop;
    case Algorithm::kRprop:
      return rprop;
    case Algorithm::kASGD:
      return asgd;
    case Algorithm::kLion:
      return lion;
    case Algorithm::kAdafactor:
    case Algorithm::kMuon:
      break;
  }
  return nullptr;
}
