// Numbers of the kernels, on the host and on cards, with the same bits: what a card's compiler would do in its own way
// (16-bit formats, exponentials) is written out. Nothing is included, since run-time compilers find no headers.
#ifdef ROUNDPIPE_ON_CARD
#define ROUNDPIPE_CODE __device__ __forceinline__
#else
#define ROUNDPIPE_INLINE __attribute__((always_inline))
#define ROUNDPIPE_CODE inline ROUNDPIPE_INLINE
#endif

namespace roundpipe::kernels {

using Int64 = long long;

ROUNDPIPE_CODE unsigned bits_of(float number) {
#ifdef ROUNDPIPE_ON_CARD
  return __float_as_uint(number);
#else
  return __builtin_bit_cast(unsigned, number);
#endif
}

ROUNDPIPE_CODE float from_bits(unsigned bits) {
#ifdef ROUNDPIPE_ON_CARD
  return __uint_as_float(bits);
#else
  return __builtin_bit_cast(float, bits);
#endif
}

ROUNDPIPE_CODE void copy_bits(float& to, unsigned bits) { to = from_bits(bits); }
ROUNDPIPE_CODE void copy_bits(unsigned& to, float number) { to = bits_of(number); }
#ifndef ROUNDPIPE_ON_CARD
// Of vectors.
template <typename To, typename From>
ROUNDPIPE_CODE void copy_bits(To& to, const From& from) {
  __builtin_memcpy(&to, &from, sizeof(to));
}
#endif

struct BFloat16 {
  unsigned short bits;
};
struct Float16 {
  unsigned short bits;
};

ROUNDPIPE_CODE float to_float(float number) { return number; }
ROUNDPIPE_CODE float to_float(BFloat16 number) { return from_bits(static_cast<unsigned>(number.bits) << 16); }
ROUNDPIPE_CODE float to_float(Float16 number) {
  const unsigned sign = (number.bits & 0x8000u) << 16, magnitude = (number.bits & 0x7fffu) << 13;
  const unsigned exponent = magnitude & 0x0f800000u;
  // Infinities and NaN; numbers; subnormal ones, which float has as plain numbers.
  const unsigned special = magnitude | 0x7f800000u, plain = magnitude + 0x38000000u;
  const unsigned small = bits_of(from_bits(magnitude + 0x38800000u) - from_bits(0x38800000u));
  return from_bits(sign | (exponent == 0x0f800000u ? special : exponent == 0 ? small : plain));
}

// The bits of a 16-bit format for those of floats: rounded to nearest, ties to even; NaN is torch's. `Unsigned` is one
// number, or on the host a vector of them, `Float` likewise.
template <typename Float, typename Unsigned>
ROUNDPIPE_CODE void round_bits(const Unsigned& bits, Unsigned& rounded, BFloat16) {
  const Unsigned nearest = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  rounded = (bits & 0x7fffffffu) > 0x7f800000u ? Unsigned{} + 0x7fc0u : nearest;
}
template <typename Float, typename Unsigned>
ROUNDPIPE_CODE void round_bits(const Unsigned& bits, Unsigned& rounded, Float16) {
  const Unsigned sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  const Unsigned shifted = magnitude - 0x38000000u;
  const Unsigned plain = (shifted + 0xfffu + ((shifted >> 13) & 1u)) >> 13;
  Float small;
  Unsigned small_bits;
  copy_bits(small, magnitude);
  small = small + 0.5f;  // 2^-24 is the last bit of both
  copy_bits(small_bits, small);
  small_bits = small_bits - 0x3f000000u;
  const Unsigned special = magnitude > 0x7f800000u ? Unsigned{} + 0x7e00u : Unsigned{} + 0x7c00u;
  const Unsigned finite = magnitude < 0x38800000u ? small_bits : plain;
  rounded = sign | (magnitude >= 0x47800000u ? special : finite);
}

ROUNDPIPE_CODE void round_to(float& to, float number) { to = number; }
template <typename Narrow>
ROUNDPIPE_CODE void round_to(Narrow& to, float number) {
  unsigned rounded;
  round_bits<float>(bits_of(number), rounded, Narrow());
  to.bits = static_cast<unsigned short>(rounded);
}

// e^rest for a rest of at most log(2) / 2, within 2 units in the last place: the polynomial of Moshier's Cephes library
// (expf). `Float`: see round_bits().
template <typename Float>
ROUNDPIPE_CODE void exponential_of_rest(const Float& rest, Float& to) {
  Float sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest;
  to = sum + 1.0f;
}

// Added to a number, it leaves the nearest whole one in the last bits.
constexpr float kRounder = 12582912.0f;

// x without `count` times log(2), in two steps.
template <typename Float>
ROUNDPIPE_CODE void take_away(const Float& x, const Float& count, Float& rest) {
  rest = x - count * 0.693359375f;
  rest = rest - count * -2.12194440e-4f;
}

// e^x within 2 units in the last place.
ROUNDPIPE_CODE float exponential(float x) {
  const float bounded = x < -104.0f ? -104.0f : x > 89.0f ? 89.0f : x;  // NaN stays
  const float count = (bounded * 1.44269504088896341f + kRounder) - kRounder;
  float rest, sum;
  take_away(bounded, count, rest);
  exponential_of_rest(rest, sum);
  // 2^count in two factors, which are plain numbers each. A NaN's count is any number, but its sum is NaN.
  const int power = static_cast<int>(count == count ? count : 0.0f), half = power / 2;
  const float low = from_bits(static_cast<unsigned>(half + 127) << 23);
  const float high = from_bits(static_cast<unsigned>(power - half + 127) << 23);
  return sum * low * high;
}

// Likewise for x of at most 0, which takes two thirds of the time; 0 where the result would be subnormal.
template <typename Float, typename Unsigned>
ROUNDPIPE_CODE void exponential_below(const Float& x, Float& to) {
  const Float least = Float{} - 87.0f;
  const Float shifted = (x < least ? least : x) * 1.44269504088896341f + kRounder;  // NaN stays
  Float rest, sum, power;
  take_away<Float>(x < least ? least : x, shifted - kRounder, rest);
  exponential_of_rest(rest, sum);
  Unsigned bits;
  copy_bits(bits, shifted);
  const Unsigned raised = (bits << 23) + 0x3f800000u;
  copy_bits(power, static_cast<Unsigned>(x < least ? Unsigned{} : raised));
  to = sum * power;
}

// log(x) for x of at least 1, infinity or NaN, within 2 units: likewise (logf).
ROUNDPIPE_CODE float logarithm(float x) {
  const unsigned bits = bits_of(x);
  int power = static_cast<int>(bits >> 23) - 126;
  float part = from_bits((bits & 0x007fffffu) | 0x3f000000u);  // 0.5 to 1
  const bool small = part < 0.707106781186547524f;
  power -= small ? 1 : 0;
  part = (small ? part + part : part) - 1.0f;
  const float square = part * part, scale = static_cast<float>(power);
  float sum = 7.0376836292e-2f;
  sum = sum * part - 1.1514610310e-1f;
  sum = sum * part + 1.1676998740e-1f;
  sum = sum * part - 1.2420140846e-1f;
  sum = sum * part + 1.4249322787e-1f;
  sum = sum * part - 1.6668057665e-1f;
  sum = sum * part + 2.0000714765e-1f;
  sum = sum * part - 2.4999993993e-1f;
  sum = sum * part + 3.3333331174e-1f;
  sum = sum * part * square;
  sum = sum + -2.12194440e-4f * scale;
  sum = sum - 0.5f * square;
  const float found = part + sum + 0.693359375f * scale;
  return x < from_bits(0x7f800000u) ? found : x;
}

ROUNDPIPE_CODE float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

ROUNDPIPE_CODE float root(float x) {
#ifdef ROUNDPIPE_ON_CARD
  return sqrtf(x);
#else
  return __builtin_sqrtf(x);
#endif
}

// Elements that a lane handles at a time.
constexpr int kVector = 8;

template <typename T>
struct alignas(16) Vector {
  T values[kVector];
};

// The host moves a vector from and to anywhere.
ROUNDPIPE_CODE bool can_move_whole(bool aligned) {
#ifdef ROUNDPIPE_ON_CARD
  return aligned;
#else
  return true;
#endif
}

// Reads `count` elements, and zeros behind them.
template <typename T>
ROUNDPIPE_CODE void read(const T* from, int count, bool aligned, float* to) {
  if (count == kVector && can_move_whole(aligned)) {
#ifdef ROUNDPIPE_ON_CARD
    const Vector<T> all = *reinterpret_cast<const Vector<T>*>(from);
#else
    Vector<T> all;
    __builtin_memcpy(&all, from, sizeof(all));
#endif
    for (int i = 0; i < kVector; ++i) to[i] = to_float(all.values[i]);
    return;
  }
  for (int i = 0; i < kVector; ++i) to[i] = i < count ? to_float(from[i]) : 0.0f;
}

#ifndef ROUNDPIPE_ON_CARD
// The host's vectors, where compilers would do one number after the other.
using Floats __attribute__((vector_size(kVector * sizeof(float)))) = float;
using Unsigneds __attribute__((vector_size(kVector * sizeof(unsigned)))) = unsigned;

ROUNDPIPE_CODE void write_whole(float* to, const float* from) { __builtin_memcpy(to, from, kVector * sizeof(float)); }
template <typename Narrow>
ROUNDPIPE_CODE void write_whole(Narrow* to, const float* from) {
  using Short __attribute__((vector_size(kVector * sizeof(unsigned short)))) = unsigned short;
  Unsigneds bits, rounded;
  __builtin_memcpy(&bits, from, sizeof(bits));
  round_bits<Floats>(bits, rounded, Narrow());
  const Short narrow = __builtin_convertvector(rounded, Short);
  __builtin_memcpy(to, &narrow, sizeof(narrow));
}
#endif

template <typename T>
ROUNDPIPE_CODE void write(T* to, int count, bool aligned, const float* from) {
  if (count == kVector && can_move_whole(aligned)) {
#ifdef ROUNDPIPE_ON_CARD
    Vector<T> all;
    for (int i = 0; i < kVector; ++i) round_to(all.values[i], from[i]);
    *reinterpret_cast<Vector<T>*>(to) = all;
#else
    write_whole(to, from);
#endif
    return;
  }
  for (int i = 0; i < kVector; ++i) {
    if (i < count) round_to(to[i], from[i]);
  }
}

// x[i] = e^(x[i] - base), for kVector numbers of at most `base`.
ROUNDPIPE_CODE void exponentials_below(float* x, float base) {
#ifdef ROUNDPIPE_ON_CARD
  for (int i = 0; i < kVector; ++i) {
    const float given = x[i] - base;
    exponential_below<float, unsigned>(given, x[i]);
  }
#else
  Floats all;
  __builtin_memcpy(&all, x, sizeof(all));
  all = all - base;
  Floats found;
  exponential_below<Floats, Unsigneds>(all, found);
  __builtin_memcpy(x, &found, sizeof(found));
#endif
}

}  // namespace roundpipe::kernels
