// Adam with a byte a moment. Part of kernels.inl.
//
// A block's magnitudes x, relative to the largest, are coded by the upper bits of the float x + kOffset: even steps
// close to zero, relative ones farther up. The low bits are rounded up or down by a hash of position and step, so that
// slow averages move in the mean although one step moves them by less than a code. exp_avg: 4 mantissa bits and a
// sign; exp_avg_sq: 5 mantissa bits of its square root, which the update needs anyway. A scale of NaN marks a block
// that is not finite.

constexpr float kOffset = 0x1p-7F;
constexpr float kLargest = 1 - kOffset;  // x of a block's largest magnitude: kLargest + kOffset is coded exactly
constexpr int kFirstShift = 23 - 4;
constexpr int kSecondShift = 23 - 5;

inline uint32_t hash(uint32_t seed, uint32_t position) {
  uint32_t h = (position ^ seed) * 0x9E3779B1U;
  h = (h ^ (h >> 15)) * 0x85EBCA77U;
  return h ^ (h >> 13);
}

inline uint32_t code_of(float x, int shift, uint32_t dither) {
  return (bits_of(x + kOffset) - bits_of(kOffset) + dither) >> shift;
}

inline float value_of(uint32_t code, int shift) { return float_of(bits_of(kOffset) + (code << shift)) - kOffset; }

// The largest magnitude, NaN if any is not finite.
inline float block_scale(const float* values, int64_t count) {
  int32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const auto magnitude = static_cast<int32_t>(bits_of(values[i]) & 0x7FFFFFFFU);
    largest = magnitude > largest ? magnitude : largest;
  }
  const auto bits = static_cast<uint32_t>(largest);
  return bits >= 0x7F800000U ? float_of(0x7FC00000U) : float_of(bits);
}

// What magnitudes are multiplied with before coding; 0 where all are too small for it, and in a NaN block.
inline float coding_factor(float scale) { return scale >= 0x1p-100F ? kLargest / scale : 0.0F; }

void decode_moments(const uint8_t* first, const uint8_t* second, float first_scale, float second_scale, int64_t count,
                    float* __restrict average, float* __restrict root) {
  const float first_factor = first_scale / kLargest;
  const float second_factor = second_scale / kLargest;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t code = first[i];
    const float magnitude = value_of(code & 0x7FU, kFirstShift) * first_factor;
    average[i] = float_of(bits_of(magnitude) ^ ((code & 0x80U) << 24));
    root[i] = value_of(second[i], kSecondShift) * second_factor;
  }
}

void encode_moments(const Coefficients& k, const float* average, const float* root, float first_scale,
                    float second_scale, int64_t begin, int64_t count, uint8_t* __restrict first,
                    uint8_t* __restrict second) {
  const float first_factor = coding_factor(first_scale);
  const float second_factor = coding_factor(second_scale);
  const auto position = static_cast<uint32_t>(begin);
  for (int32_t i = 0; i < static_cast<int32_t>(count); ++i) {
    const uint32_t dither = hash(k.dither_seed, position + static_cast<uint32_t>(i));
    const uint32_t first_dither = dither & ((1U << kFirstShift) - 1);
    const uint32_t magnitude = code_of(__builtin_fabsf(average[i]) * first_factor, kFirstShift, first_dither);
    first[i] = static_cast<uint8_t>(magnitude | ((bits_of(average[i]) >> 24) & 0x80U));
    const uint32_t code = code_of(root[i] * second_factor, kSecondShift, dither >> (32 - kSecondShift));
    // A denominator that is not zero must not become zero.
    second[i] = static_cast<uint8_t>(code == 0 && root[i] > 0 ? 1 : code);
  }
}

void adam_8bit(const Coefficients& k, const Memory& memory, Values g, Chunk p, int64_t begin, int64_t count) {
  uint8_t* const first = static_cast<uint8_t*>(memory.states[0]) + begin;
  float* const first_scale = static_cast<float*>(memory.states[1]) + begin / kChunk;
  uint8_t* const second = static_cast<uint8_t*>(memory.states[2]) + begin;
  float* const second_scale = static_cast<float*>(memory.states[3]) + begin / kChunk;
  alignas(64) float average[kChunk];
  alignas(64) float root[kChunk];
  decode_moments(first, second, *first_scale, *second_scale, count, average, root);
  for (int64_t i = 0; i < count; ++i) {
    average[i] = interpolate(k.first, average[i], g[i]);
    root[i] = __builtin_sqrtf(decayed_square(k, root[i] * root[i], g[i]));
    p[i] += k.rate * average[i] / (root[i] / k.second_divisor + k.eps);
  }
  *first_scale = block_scale(average, count);
  *second_scale = block_scale(root, count);
  encode_moments(k, average, root, *first_scale, *second_scale, begin, count, first, second);
}
