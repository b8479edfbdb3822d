#pragma once

#include <cstdint>

namespace roundpipe {

// The rules of memory that the engine keeps and simulate::predict_device predicts by.

// How many microbatches have values on a device at a time, also across the end of a job: the running one and two
// staged ahead.
inline constexpr int kStagedMicrobatches = 3;

// Share of a device's cap that stays free for activations while nobody knows what jobs take; beyond it, an idle slot of
// weights is freed.
inline constexpr double kActivationShare = 0.4;

// Whether `held_bytes` fit under a device's cap; 0 = no cap.
constexpr bool fits_cap(std::int64_t held_bytes, std::int64_t cap_bytes) {
  return cap_bytes == 0 || held_bytes <= cap_bytes;
}

// Memory on a device for the gradients of weights.
struct GradientBytes {
  std::int64_t sent = 0;     // as they are transferred
  std::int64_t sums = 0;     // over the microbatches
  std::int64_t rounded = 0;  // of sums, rounded before the transfer
};
// `own_bytes` in the weights' dtype, `sum_bytes` in the sums' dtype: 16-bit gradients are summed in fp32. Sums of tied
// weights go as they are, since the host adds them up.
constexpr GradientBytes gradient_bytes(std::int64_t own_bytes, std::int64_t sum_bytes, bool wider_sums, bool tied) {
  return {tied ? sum_bytes : own_bytes, sum_bytes, wider_sums && !tied ? own_bytes : 0};
}

// How many of the partial sums of a gradient, at least two, the host keeps beside it: one of the gradient's own dtype
// can become the gradient.
constexpr std::int64_t partial_sums(std::int64_t parts, bool wider_sums) { return wider_sums ? parts : parts - 1; }

}  // namespace roundpipe
