// Muon's passes over chunks. Part of kernels.inl.

// Rounds to nearest, ties to even, as torch does. NaN stays NaN.
inline uint16_t to_bfloat16(float value) {
  const uint32_t bits = bits_of(value);
  const uint32_t rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
  return static_cast<uint16_t>((bits & 0x7FFFFFFFU) > 0x7F800000U ? 0x7FC0U : rounded);
}

void muon_direction(Interpolation towards_gradient, Interpolation ahead, bool nesterov, const float* g, int64_t count,
                    float* __restrict buffer, uint16_t* __restrict direction) {
  for (int64_t i = 0; i < count; ++i) {
    const float average = interpolate(towards_gradient, buffer[i], g[i]);
    buffer[i] = average;
    direction[i] = to_bfloat16(nesterov ? interpolate(ahead, g[i], average) : average);
  }
}
