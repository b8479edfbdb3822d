// Adam with a byte a moment. Part of kernels.inl.
//
// A block's magnitudes x, relative to the largest, are coded by the upper bits of the float x + kOffset: even steps
// close to zero, relative ones farther up. The low bits are rounded up or down by position and step, so that slow
// averages move in the mean although one step moves them by less than a code. exp_avg: 4 mantissa bits and a sign;
// exp_avg_sq: 5 mantissa bits of its square root, which the update needs anyway. Both round alike, which keeps their
// quotient close. A scale of NaN marks a block that is not finite.

constexpr float kOffset = 0x1p-7F;
constexpr float kLargest = 1 - kOffset;  // x of a block's largest magnitude: kLargest + kOffset is coded exactly
constexpr float kLeastRoot = 0x1p-13F;   // half of the first step: what was not zero must not divide as zero
constexpr int kFirstShift = 23 - 4;
constexpr int kSecondShift = 23 - 5;

// Evenly spread over positions, and with `seed` counting steps over time. The golden ratio's multiples, modulo 2^32.
constexpr uint32_t kGolden = 0x9E3779B1U;
inline uint32_t dither_at(uint32_t seed, int64_t position) {
  return static_cast<uint32_t>(position) * kGolden + seed * 0xC13FA9A9U;
}

// Magnitudes compare as their bits do, and NaN as the largest of all.
inline int32_t larger_magnitude(int32_t largest, float value) {
  const auto magnitude = static_cast<int32_t>(bits_of(value) & 0x7FFFFFFFU);
  return magnitude > largest ? magnitude : largest;
}

// NaN if the largest is not finite.
inline float block_scale(int32_t largest) {
  const auto bits = static_cast<uint32_t>(largest);
  return bits >= 0x7F800000U ? float_of(0x7FC00000U) : float_of(bits);
}

// What magnitudes are multiplied with before coding; 0 where all are too small for it, and in a NaN block.
inline float coding_factor(float scale) { return scale >= 0x1p-100F ? kLargest / scale : 0.0F; }

// (float of the code - kOffset) * factor; exact for code 0 since kOffset is a power of two.
inline float decoded(uint32_t shifted_code, float factor) {
  return fused(float_of(bits_of(kOffset) + shifted_code), factor, -kOffset * factor);
}

void decode_moments(const uint8_t* first, const uint8_t* second, float first_scale, float second_scale, int64_t count,
                    float* __restrict average, float* __restrict root) {
  const float first_factor = first_scale / kLargest;
  const float second_factor = second_scale / kLargest;
  const float least_root = kLeastRoot * second_factor;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = static_cast<uint32_t>(first[i]) << 24;
    const float magnitude = decoded((code & 0x7F000000U) >> (24 - kFirstShift), first_factor);
    average[i] = float_of(bits_of(magnitude) | (code & 0x80000000U));
    const float value = decoded(static_cast<uint32_t>(second[i]) << kSecondShift, second_factor);
    root[i] = value > least_root ? value : least_root;
  }
}

void encode_moments(uint32_t dither, const float* average, const float* root, float first_scale, float second_scale,
                    int64_t count, uint8_t* __restrict first, uint8_t* __restrict second) {
  const float first_factor = coding_factor(first_scale);
  const float second_factor = coding_factor(second_scale);
  for (uint32_t i = 0; i < static_cast<uint32_t>(count); ++i) {
    const uint32_t round = ((dither + i * kGolden) >> (32 - kFirstShift)) - bits_of(kOffset);
    const uint32_t magnitude = bits_of(fused(__builtin_fabsf(average[i]), first_factor, kOffset)) + round;
    first[i] = static_cast<uint8_t>((magnitude >> kFirstShift) | ((bits_of(average[i]) >> 24) & 0x80U));
    // One mantissa bit more: half the step, and half of what is added for rounding.
    const uint32_t root_round = ((dither + i * kGolden) >> (32 - kSecondShift)) - bits_of(kOffset);
    second[i] = static_cast<uint8_t>((bits_of(fused(root[i], second_factor, kOffset)) + root_round) >> kSecondShift);
  }
}

inline void adam_8bit(Coefficients k, const Memory& memory, Values g, Chunk p, int64_t begin, int64_t count) {
  uint8_t* const first = static_cast<uint8_t*>(memory.states[0]) + begin;
  float* const first_scale = static_cast<float*>(memory.states[1]) + begin / kChunk;
  uint8_t* const second = static_cast<uint8_t*>(memory.states[2]) + begin;
  float* const second_scale = static_cast<float*>(memory.states[3]) + begin / kChunk;
  alignas(64) float average[kChunk];
  alignas(64) float root[kChunk];
  decode_moments(first, second, *first_scale, *second_scale, count, average, root);
  const float correction = 1 / k.second_divisor;
  int32_t largest_average = 0;
  int32_t largest_root = 0;
  for (int64_t i = 0; i < count; ++i) {
    average[i] = interpolate(k.first, average[i], g[i]);
    root[i] = __builtin_sqrtf(decayed_square(k, root[i] * root[i], g[i]));
    largest_average = larger_magnitude(largest_average, average[i]);
    largest_root = larger_magnitude(largest_root, root[i]);
    p[i] += k.rate * average[i] / fused(root[i], correction, k.eps);
  }
  *first_scale = block_scale(largest_average);
  *second_scale = block_scale(largest_root);
  encode_moments(dither_at(k.dither_seed, begin), average, root, *first_scale, *second_scale, count, first, second);
}
