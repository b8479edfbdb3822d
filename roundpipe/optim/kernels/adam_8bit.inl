// Adam with one byte per moment. Part of kernels.inl.
//
// Let x be a magnitude relative to the largest one of its block. Its code is the upper bits of the float x + kOffset:
// equal steps close to zero, relative steps farther up. Position and step decide whether the low bits round up or down,
// so that slow averages move in the mean although one step moves them by less than a code. exp_avg has 4 mantissa bits
// and a sign. exp_avg_sq has 5 mantissa bits of its square root, which the update needs anyway. Both round alike, which
// keeps their quotient close. A scale of NaN marks a block that is not finite.
//
// Four codes make a word: byte q of word j belongs to the block's element 64 q + j, so that a register of words is
// coded and decoded by shifts alone. The last block is a full one, too.

constexpr float kOffset = 0x1p-7F;
constexpr float kLargest = 1 - kOffset;  // x of a block's largest magnitude: kLargest + kOffset is coded exactly
constexpr float kLeastRoot = 0x1p-13F;   // half of the first step: a root above zero must not divide as zero
constexpr int kFirstShift = 23 - 4;
constexpr int kSecondShift = 23 - 5;

// Spread evenly over positions and, because `seed` counts steps, over time: multiples of the golden ratio, modulo 2^32.
constexpr uint32_t kGolden = 0x9E3779B1U;
inline uint32_t dither_at(uint32_t seed, int64_t position) {
  return static_cast<uint32_t>(position) * kGolden + seed * 0xC13FA9A9U;
}

// `bits` are the bits of the largest magnitude. Returns NaN unless it is finite.
inline float block_scale(uint32_t bits) { return bits >= 0x7F800000U ? float_of(0x7FC00000U) : float_of(bits); }

// The factor of magnitudes before coding; 0 if all of them are too small, and in a NaN block.
inline float coding_factor(float scale) { return scale >= 0x1p-100F ? kLargest / scale : 0.0F; }

// (float of the code - kOffset) * factor; exact for code 0, because kOffset is a power of two.
inline float decoded(uint32_t shifted_code, float factor) {
  return fused(float_of(bits_of(kOffset) + shifted_code), factor, -kOffset * factor);
}

using Words = uint32_t __attribute__((may_alias));
constexpr int64_t kWords = kChunk / 4;

// The bits `mask` of (word >> 8 q), shifted left by `shift`, with a single shift.
template <int q, int shift>
inline uint32_t field(uint32_t word, uint32_t mask) {
  constexpr int left = shift - 8 * q;
  if constexpr (left >= 0) {
    return (word << left) & (mask << shift);
  } else {
    return (word >> -left) & (mask << shift);
  }
}

// The numbers that decode one block's codes.
struct Decoding {
  float first_factor;
  float second_factor;
  float least_root;
  float correction;
  float weight;  // of the gradient in exp_avg
};

// The bits of the largest magnitudes. Values that are not finite are larger than all others.
struct Largest {
  uint32_t average = 0;
  uint32_t root = 0;
};

// Makes one step of the elements whose codes are byte `q` of the words.
template <int q>
inline void step_quarter(const Coefficients& k, const Decoding& d, const Words* first, const Words* second, Values g,
                         Chunk p, Chunk average, Chunk root, Largest& largest) {
  constexpr int64_t at = q * kWords;
  Largest seen = largest;
  for (int64_t j = 0; j < kWords; ++j) {
    const float magnitude = decoded(field<q, kFirstShift>(first[j], 0x7F), d.first_factor);
    const float average_before = float_of(bits_of(magnitude) | field<q, 24>(first[j], 0x80));
    const float decoded_root = decoded(field<q, kSecondShift>(second[j], 0xFF), d.second_factor);
    const float root_before = decoded_root > d.least_root ? decoded_root : d.least_root;
    const float average_after = fused(d.weight, g[at + j] - average_before, average_before);
    const float root_after = __builtin_sqrtf(decayed_square(k, root_before * root_before, g[at + j]));
    p[at + j] += k.rate * average_after / fused(root_after, d.correction, k.eps);
    average[at + j] = average_after;
    root[at + j] = root_after;
    const uint32_t average_bits = bits_of(average_after) & 0x7FFFFFFFU;
    // Negative only if NaN, which is then larger than all others as well.
    const uint32_t root_bits = bits_of(root_after);
    seen.average = average_bits > seen.average ? average_bits : seen.average;
    seen.root = root_bits > seen.root ? root_bits : seen.root;
  }
  largest = seen;
}

// Makes byte `q` of a word from an element of that quarter. `round` is added before the low bits are cut off; kOffset's
// bits are already subtracted from it.
template <int q>
inline uint32_t first_field(float value, float factor, uint32_t round) {
  const uint32_t magnitude = bits_of(fused(__builtin_fabsf(value), factor, kOffset)) + round;
  return ((magnitude >> kFirstShift) << (8 * q)) | ((bits_of(value) & 0x80000000U) >> (24 - 8 * q));
}
template <int q>
inline uint32_t second_field(float value, float factor, uint32_t round) {
  return ((bits_of(fused(value, factor, kOffset)) + round) >> kSecondShift) << (8 * q);
}

void encode_moments(uint32_t dither, const float* average, const float* root, float first_scale, float second_scale,
                    Words* __restrict first, Words* __restrict second) {
  const float a = coding_factor(first_scale);
  const float b = coding_factor(second_scale);
  const float* const average1 = average + kWords;
  const float* const average2 = average + 2 * kWords;
  const float* const average3 = average + 3 * kWords;
  const float* const root1 = root + kWords;
  const float* const root2 = root + 2 * kWords;
  const float* const root3 = root + 3 * kWords;
  for (uint32_t j = 0; j < kWords; ++j) {
    const uint32_t spread = (dither + j * kGolden) >> (32 - kFirstShift);
    const uint32_t round = spread - bits_of(kOffset);
    // One more mantissa bit: half the step, so half the number that is added for rounding.
    const uint32_t root_round = (spread >> 1) - bits_of(kOffset);
    first[j] = first_field<0>(average[j], a, round) | first_field<1>(average1[j], a, round) |
               first_field<2>(average2[j], a, round) | first_field<3>(average3[j], a, round);
    second[j] = second_field<0>(root[j], b, root_round) | second_field<1>(root1[j], b, root_round) |
                second_field<2>(root2[j], b, root_round) | second_field<3>(root3[j], b, root_round);
  }
}

// REQUIRES: g and p hold kChunk values, with zeros after the end of the parameter.
inline void adam_8bit(Coefficients k, const Memory& memory, Values g, Chunk p, int64_t begin) {
  Words* const first = static_cast<Words*>(memory.states[0]) + begin / 4;
  float* const first_scale = static_cast<float*>(memory.states[1]) + begin / kChunk;
  Words* const second = static_cast<Words*>(memory.states[2]) + begin / 4;
  float* const second_scale = static_cast<float*>(memory.states[3]) + begin / kChunk;
  alignas(64) float average[kChunk];
  alignas(64) float root[kChunk];
  const float second_factor = *second_scale / kLargest;
  const Decoding d = {*first_scale / kLargest, second_factor, kLeastRoot * second_factor, 1 / k.second_divisor,
                      k.first.from_end ? k.first.coefficient + 1 : k.first.coefficient};
  Largest largest;
  step_quarter<0>(k, d, first, second, g, p, average, root, largest);
  step_quarter<1>(k, d, first, second, g, p, average, root, largest);
  step_quarter<2>(k, d, first, second, g, p, average, root, largest);
  step_quarter<3>(k, d, first, second, g, p, average, root, largest);
  *first_scale = block_scale(largest.average);
  *second_scale = block_scale(largest.root);
  encode_moments(dither_at(k.dither_seed, k.first_element + begin), average, root, *first_scale, *second_scale, first,
                 second);
}
