// Conversions between memory and chunks of fp32. Part of kernels.inl.

inline uint32_t bits_of(float value) { return __builtin_bit_cast(uint32_t, value); }
inline float float_of(uint32_t bits) { return __builtin_bit_cast(float, bits); }

inline float from_bfloat16(uint16_t bits) { return float_of(static_cast<uint32_t>(bits) << 16); }

inline float from_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
  const uint32_t magnitude = bits & 0x7FFFU;
  const uint32_t normal = (magnitude << 13) + ((127U - 15U) << 23);
  const uint32_t not_finite = (magnitude << 13) | 0x7F800000U;
  // A denormal's mantissa counts units of 2^-24.
  const uint32_t denormal = bits_of(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24F);
  uint32_t value = magnitude < 0x0400U ? denormal : normal;
  value = magnitude >= 0x7C00U ? not_finite : value;
  return float_of(value | sign);
}

// Rounds to nearest, ties to even. NaN keeps the upper bits of its payload.
inline uint16_t to_float16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  const uint32_t normal = (magnitude + 0xFFFU + ((magnitude >> 13) & 1U) - ((127U - 15U) << 23)) >> 13;
  // The addition rounds to units of 2^-24 and leaves their count in the low bits.
  const uint32_t denormal = bits_of(float_of(magnitude) + 0.5F) - bits_of(0.5F);
  const uint32_t nan = 0x7E00U | ((magnitude >> 13) & 0x3FFU);
  uint32_t result = magnitude < 0x38800000U ? denormal : normal;
  result = magnitude >= 0x47800000U ? 0x7C00U : result;
  result = magnitude > 0x7F800000U ? nan : result;
  return static_cast<uint16_t>(result | ((bits >> 16) & 0x8000U));
}

inline float joined(uint16_t weight, int16_t remainder) {
  return float_of((static_cast<uint32_t>(weight) << 16) + static_cast<uint32_t>(static_cast<int32_t>(remainder)));
}

// The nearest bf16, ties away from zero. All arithmetic is modulo 2^32, so that every bit pattern can be restored.
inline uint16_t split_weight(uint32_t bits) { return static_cast<uint16_t>((bits + 0x8000U) >> 16); }
inline int16_t split_remainder(uint32_t bits, uint16_t weight) {
  return static_cast<int16_t>(static_cast<uint16_t>(bits - (static_cast<uint32_t>(weight) << 16)));
}

#include <roundpipe/optim/kernels/master_24bit.inl>

inline void load_elements(Element type, const void* memory, int64_t begin, int64_t count, float* __restrict values) {
  switch (type) {
    case Element::kFloat32: {
      const float* const source = static_cast<const float*>(memory) + begin;
      for (int64_t i = 0; i < count; ++i) values[i] = source[i];
      break;
    }
    case Element::kBFloat16: {
      const uint16_t* const source = static_cast<const uint16_t*>(memory) + begin;
      for (int64_t i = 0; i < count; ++i) values[i] = from_bfloat16(source[i]);
      break;
    }
    case Element::kFloat16: {
      const uint16_t* const source = static_cast<const uint16_t*>(memory) + begin;
      for (int64_t i = 0; i < count; ++i) values[i] = from_float16(source[i]);
      break;
    }
  }
}

inline void multiply(float factor, int64_t count, float* values) {
  for (int64_t i = 0; i < count; ++i) values[i] *= factor;
}

void load_gradient(const Memory& memory, int64_t begin, int64_t count, float* values) {
  load_elements(memory.gradient_type, memory.gradient, begin, count, values);
  if (memory.inverse_scale != 1) multiply(memory.inverse_scale, count, values);
  if (memory.clip != 1) multiply(memory.clip, count, values);
}

void load_weights(const Memory& memory, int64_t begin, int64_t count, float* __restrict values) {
  if (memory.weight_type == Element::kBFloat16) {
    const uint16_t* const weight = static_cast<const uint16_t*>(memory.before) + begin;
    if (memory.short_remainder != nullptr) return join_short(weight, memory.short_remainder + begin, count, values);
    const int16_t* const remainder = memory.remainder + begin;
    for (int64_t i = 0; i < count; ++i) values[i] = joined(weight[i], remainder[i]);
  } else {
    const bool kept_apart = memory.weight_type == Element::kFloat16;
    const float* const source = (kept_apart ? memory.master : static_cast<const float*>(memory.before)) + begin;
    for (int64_t i = 0; i < count; ++i) values[i] = source[i];
  }
}

void split_range(const float* master, uint16_t* __restrict weight, int16_t* __restrict remainder, int64_t begin,
                 int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const uint32_t bits = bits_of(master[i]);
    const uint16_t rounded = split_weight(bits);
    weight[i] = rounded;
    remainder[i] = split_remainder(bits, rounded);
  }
}

void join_range(const uint16_t* weight, const int16_t* remainder, float* __restrict master, int64_t begin,
                int64_t end) {
  for (int64_t i = begin; i < end; ++i) master[i] = joined(weight[i], remainder[i]);
}

void store_weights(const Memory& memory, int64_t begin, int64_t count, const float* __restrict values) {
  if (memory.weight_type == Element::kBFloat16) {
    if (memory.short_remainder != nullptr) return split_short(memory, begin, count, values);
    split_range(values, static_cast<uint16_t*>(memory.after) + begin, memory.remainder + begin, 0, count);
    return;
  }
  const bool kept_apart = memory.weight_type == Element::kFloat16;
  float* const target = (kept_apart ? memory.master : static_cast<float*>(memory.after)) + begin;
  for (int64_t i = 0; i < count; ++i) target[i] = values[i];
  if (kept_apart) {
    uint16_t* const weight = static_cast<uint16_t*>(memory.after) + begin;
    for (int64_t i = 0; i < count; ++i) weight[i] = to_float16(values[i]);
  }
}

// Sums are taken in lanes, so that the order of additions does not depend on the width of registers.
constexpr int64_t kLanes = 16;

double sum_of_squares(Element type, const void* gradient, float inverse_scale, int64_t begin, int64_t end) {
  alignas(64) float values[kChunk];
  alignas(64) double sums[kLanes] = {};
  const double scale = inverse_scale;
  for (int64_t at = begin; at < end; at += kChunk) {
    const int64_t count = end - at < kChunk ? end - at : kChunk;
    load_elements(type, gradient, at, count, values);
    for (int64_t i = count; i < kChunk; ++i) values[i] = 0;
    for (int64_t i = 0; i < kChunk; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        const double value = static_cast<double>(values[i + lane]) * scale;
        sums[lane] += value * value;
      }
    }
  }
  double sum = 0;
  for (const double lane_sum : sums) sum += lane_sum;
  return sum;
}
