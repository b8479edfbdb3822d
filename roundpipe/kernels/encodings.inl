// Numbers in fewer bits: a code for each of them, and a scale for each block. A number is value(code) * factor(scale),
// in fp32, rounded once.
namespace roundpipe::kernels {

// The 4-bit codes of a vector's numbers, two in a byte.
template <bool kHighFirst>
struct PackedCodes {
  static constexpr int kInByte = 2;
  ROUNDPIPE_CODE static void read(const unsigned char* codes, Int64 from, int count, bool aligned, unsigned* to) {
    const unsigned char* const bytes = codes + from / 2;
    unsigned word = 0;
    if (count == kVector && can_move_whole(aligned)) {
#ifdef ROUNDPIPE_ON_CARD
      word = *reinterpret_cast<const unsigned*>(bytes);
#else
      __builtin_memcpy(&word, bytes, sizeof(word));
#endif
    } else {
      for (int i = 0; i < (count + 1) / 2; ++i) word |= static_cast<unsigned>(bytes[i]) << (8 * i);
    }
#ifdef ROUNDPIPE_ON_CARD
    for (int i = 0; i < kVector; ++i) to[i] = (word >> (4 * (kHighFirst ? i ^ 1 : i))) & 15u;
#else
    Unsigneds words, shifts;  // one by one, codes would go through memory
    for (int i = 0; i < kVector; ++i) {
      words[i] = word;
      shifts[i] = static_cast<unsigned>(4 * (kHighFirst ? i ^ 1 : i));
    }
    const Unsigneds found = (words >> shifts) & 15u;
    __builtin_memcpy(to, &found, sizeof(found));
#endif
  }
  ROUNDPIPE_CODE static void write(unsigned char* codes, Int64 to, int count, const unsigned* from) {
    for (int i = 0; 2 * i < count; ++i) {
      const unsigned first = from[2 * i], second = from[2 * i + 1];
      codes[to / 2 + i] = static_cast<unsigned char>(kHighFirst ? first << 4 | second : second << 4 | first);
    }
  }
};

// The values of a vector's 4-bit codes. The host looks them up, where a card chooses.
template <typename Form>
ROUNDPIPE_CODE void values_of(const unsigned* codes, float* to) {
#ifdef ROUNDPIPE_ON_CARD
  for (int i = 0; i < kVector; ++i) to[i] = Form::value(codes[i]);
#else
  Floats low, high;
  Unsigneds places;
  for (int i = 0; i < kVector; ++i) {
    low[i] = Form::value(static_cast<unsigned>(i));
    high[i] = Form::value(static_cast<unsigned>(i + kVector));
  }
  __builtin_memcpy(&places, codes, sizeof(places));
  const Floats found = __builtin_shuffle(low, high, places);
  __builtin_memcpy(to, &found, sizeof(found));
#endif
}

// For each number how many of the ascending bounds it is above or, of those that are `reached`, at least equal to.
template <int kBounds>
ROUNDPIPE_CODE void count_bounds(const float* numbers, const float (&bounds)[kBounds], unsigned reached, unsigned* to) {
  for (int i = 0; i < kVector; ++i) to[i] = 0;
  for (int bound = 0; bound < kBounds; ++bound) {
    const bool takes_equal = (reached >> bound & 1u) != 0;
    for (int i = 0; i < kVector; ++i) {
      const bool is_above = takes_equal ? numbers[i] >= bounds[bound] : numbers[i] > bounds[bound];
      to[i] += is_above ? 1u : 0u;
    }
  }
}

// The larger one; NaN if one is.
ROUNDPIPE_CODE float larger(float a, float b) { return b > a || b != b ? b : a; }
ROUNDPIPE_CODE float magnitude(float x) { return from_bits(bits_of(x) & 0x7fffffffu); }

// Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs", 2023, appendix E: the quantiles of a normal
// distribution between -1 and 1, times the block's largest magnitude. The first of two numbers is in a byte's high
// bits, as in bitsandbytes.
struct Nf4 : PackedCodes<true> {
  using Scale = float;
  ROUNDPIPE_CODE static float either(unsigned bit, float set, float clear) { return bit != 0 ? set : clear; }
  ROUNDPIPE_CODE static float value(unsigned code) {
    const unsigned one = code & 1u, two = code & 2u, four = code & 4u;
    const float low = either(four,
                             either(two, either(one, 0.0f, -0.09105003625154495f),
                                    either(one, -0.18477343022823334f, -0.28444138169288635f)),
                             either(two, either(one, -0.39491748809814453f, -0.5250730514526367f),
                                    either(one, -0.6961928009986877f, -1.0f)));
    const float high = either(
        four,
        either(two, either(one, 1.0f, 0.7229568362236023f), either(one, 0.5626170039176941f, 0.44070982933044434f)),
        either(two, either(one, 0.33791524171829224f, 0.24611230194568634f),
               either(one, 0.16093020141124725f, 0.07958029955625534f)));
    return either(code & 8u, high, low);
  }
  ROUNDPIPE_CODE static float factor(Scale scale) { return scale; }
  ROUNDPIPE_CODE static Scale scale(float largest) { return largest; }
  ROUNDPIPE_CODE static float inverse(float largest) { return 1.0f / (largest < 1e-38f ? 1e-38f : largest); }
  ROUNDPIPE_CODE static void values(const unsigned* codes, float* to) { values_of<Nf4>(codes, to); }
  // The nearest values; the lower one of two.
  ROUNDPIPE_CODE static void codes(const float* scaled, unsigned* to) {
    float bounds[15];
    for (unsigned i = 0; i < 15; ++i) bounds[i] = (value(i) + value(i + 1)) / 2;
    count_bounds(scaled, bounds, 0u, to);
  }
};

// "OCP Microscaling Formats (MX) Specification", 1.0, 2023: E2M1 numbers times a power of two. The first of two numbers
// is in a byte's low bits, as in GPT-OSS's files.
struct Mxfp4 : PackedCodes<false> {
  using Scale = unsigned char;  // E8M0
  ROUNDPIPE_CODE static float value(unsigned code) {
    const unsigned exponent = (code >> 1) & 3u, mantissa = code & 1u;
    const unsigned halves = exponent == 0 ? mantissa : (2u + mantissa) << (exponent - 1u);
    return from_bits(bits_of(static_cast<float>(halves) * 0.5f) | (code & 8u) << 28);
  }
  ROUNDPIPE_CODE static float factor(Scale scale) {
    return from_bits(scale == 255 ? 0x7fc00000u : scale == 0 ? 0x00400000u : static_cast<unsigned>(scale) << 23);
  }
  // The largest magnitude's power of two is 4's; what is beyond 6 becomes 6.
  ROUNDPIPE_CODE static Scale scale(float largest) {
    const unsigned exponent = bits_of(largest) >> 23;
    return static_cast<Scale>(exponent == 255u ? 255u : exponent < 2u ? 0u : exponent - 2u);
  }
  ROUNDPIPE_CODE static float inverse(float largest) {
    const unsigned exponent = scale(largest);  // 254 - exponent is that of the inverse, which is a plain number
    return from_bits((254u - (exponent == 255u ? 0u : exponent)) << 23);
  }
  ROUNDPIPE_CODE static void values(const unsigned* codes, float* to) { values_of<Mxfp4>(codes, to); }
  // To nearest, ties to even mantissas.
  ROUNDPIPE_CODE static void codes(const float* scaled, unsigned* to) {
    const float bounds[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    float sizes[kVector];
    for (int i = 0; i < kVector; ++i) sizes[i] = magnitude(scaled[i]);
    count_bounds(sizes, bounds, 0x2au, to);
    for (int i = 0; i < kVector; ++i) to[i] |= bits_of(scaled[i]) >> 28 & 8u;
  }
};

// Whole numbers from -8 to 7, stored without a sign, times a fraction of the block's largest magnitude. The first of
// two numbers is in a byte's low bits, as in compressed-tensors' "pack-quantized".
struct Int4 : PackedCodes<false> {
  using Scale = float;
  ROUNDPIPE_CODE static float value(unsigned code) { return static_cast<float>(static_cast<int>(code) - 8); }
  ROUNDPIPE_CODE static float factor(Scale scale) { return scale; }
  ROUNDPIPE_CODE static Scale scale(float largest) { return largest / 7.5f; }
  ROUNDPIPE_CODE static float inverse(float largest) { return 7.5f / (largest < 1e-38f ? 1e-38f : largest); }
  ROUNDPIPE_CODE static void values(const unsigned* codes, float* to) { values_of<Int4>(codes, to); }
  ROUNDPIPE_CODE static void codes(const float* scaled, unsigned* to) {
    for (int i = 0; i < kVector; ++i) {
      const float nearest = (scaled[i] + kRounder) - kRounder, shifted = nearest > 7.0f ? 15.0f : nearest + 8.0f;
      to[i] = shifted == shifted ? static_cast<unsigned>(static_cast<int>(shifted)) & 15u : 8u;
    }
  }
};

// A vector's codes of a byte each.
struct ByteCodes {
  static constexpr int kInByte = 1;
  ROUNDPIPE_CODE static void read(const unsigned char* codes, Int64 from, int count, bool, unsigned* to) {
    for (int i = 0; i < kVector; ++i) to[i] = i < count ? codes[from + i] : 0u;
  }
  ROUNDPIPE_CODE static void write(unsigned char* codes, Int64 to, int count, const unsigned* from) {
    for (int i = 0; i < count; ++i) codes[to + i] = static_cast<unsigned char>(from[i]);
  }
};

// Whole numbers up to 127, times a fraction of the block's largest magnitude.
struct Int8 : ByteCodes {
  using Scale = float;
  ROUNDPIPE_CODE static float value(unsigned code) { return static_cast<float>(static_cast<int>(code << 24) >> 24); }
  ROUNDPIPE_CODE static float factor(Scale scale) { return scale; }
  ROUNDPIPE_CODE static Scale scale(float largest) { return largest / 127.0f; }
  ROUNDPIPE_CODE static float inverse(float largest) { return 127.0f / (largest < 1e-38f ? 1e-38f : largest); }
  ROUNDPIPE_CODE static void values(const unsigned* codes, float* to) {
    for (int i = 0; i < kVector; ++i) to[i] = value(codes[i]);
  }
  ROUNDPIPE_CODE static void codes(const float* scaled, unsigned* to) {
    for (int i = 0; i < kVector; ++i) {
      const float nearest = (scaled[i] + kRounder) - kRounder;
      to[i] = nearest == nearest ? static_cast<unsigned>(static_cast<int>(nearest)) & 255u : 0u;
    }
  }
};

// Micikevicius et al., "FP8 Formats for Deep Learning", 2022: E4M3 numbers, of which 448 is the largest and which have
// no infinity, times a fraction of the block's largest magnitude.
struct Fp8 : ByteCodes {
  using Scale = float;
  static constexpr unsigned kNan = 127u;
  ROUNDPIPE_CODE static float value(unsigned code) {
    const unsigned exponent = (code >> 3) & 15u, mantissa = code & 7u;
    const unsigned eighths = exponent == 0 ? mantissa : mantissa + 8u, power = exponent == 0 ? 1u : exponent;
    const float plain = static_cast<float>(static_cast<int>(eighths)) * from_bits((power + 117u) << 23);
    return from_bits(((code & kNan) == kNan ? 0x7fc00000u : bits_of(plain)) | (code & 128u) << 24);
  }
  ROUNDPIPE_CODE static float factor(Scale scale) { return scale; }
  ROUNDPIPE_CODE static Scale scale(float largest) { return largest / 448.0f; }
  ROUNDPIPE_CODE static float inverse(float largest) { return 448.0f / (largest < 1e-35f ? 1e-35f : largest); }
  ROUNDPIPE_CODE static void values(const unsigned* codes, float* to) {
    for (int i = 0; i < kVector; ++i) to[i] = value(codes[i]);
  }
  // To nearest, ties to even mantissas.
  ROUNDPIPE_CODE static void codes(const float* scaled, unsigned* to) {
    for (int i = 0; i < kVector; ++i) {
      const float size = magnitude(scaled[i]), small = (size * 512.0f + kRounder) - kRounder;
      const unsigned bits = bits_of(size), rounded = (bits + 0x7ffffu + (bits >> 20 & 1u)) >> 20;
      const unsigned plain = rounded - (120u << 3), bounded = plain > 126u ? 126u : plain;
      const unsigned code = size < 0.015625f ? static_cast<unsigned>(static_cast<int>(small)) : bounded;
      to[i] = (size == size ? code : kNan) | (bits_of(scaled[i]) >> 24 & 128u);
    }
  }
};

// An item is some whole blocks, or a block that is a row.
template <typename Form, typename T>
struct Decode : PlainKernel {
  Int64 items;
  int width;
  int lanes;
  bool aligned;
  int scales_of_item;
  int shift;  // 2^shift numbers have a scale; 31: an item has
  const unsigned char* codes;
  const typename Form::Scale* scales;
  T* values;
  ROUNDPIPE_ADDRESSES(codes, scales, values)

  ROUNDPIPE_CODE void first(const Place& at, State&) const {
    unsigned code[kVector];
    float x[kVector];
    const Int64 from = at.item * width + at.first;
    Form::read(codes, from, at.count, aligned, code);
    const float factor = Form::factor(scales[at.item * scales_of_item + (at.first >> shift)]);
    Form::values(code, x);
    for (int i = 0; i < kVector; ++i) x[i] = x[i] * factor;
    write(values + from, at.count, aligned, x);
  }
};

// An item is a block.
template <typename Form, typename T>
struct Encode : PlainKernel {
  static constexpr int kNumbers = 1;
  Int64 items;
  int width;
  int lanes;
  bool aligned;
  const T* values;
  unsigned char* codes;
  typename Form::Scale* scales;
  ROUNDPIPE_ADDRESSES(values, codes, scales)

  struct State {
    float largest;
  };
  ROUNDPIPE_CODE State begin_row(Int64, int) const { return {0.0f}; }
  ROUNDPIPE_CODE void first(const Place& at, State& state) const {
    float x[kVector];
    read(values + at.item * width + at.first, at.count, aligned, x);
    for (int i = 0; i < kVector; ++i) state.largest = larger(state.largest, magnitude(x[i]));
  }
  ROUNDPIPE_CODE void numbers(const State& state, float* to) const { to[0] = state.largest; }
  ROUNDPIPE_CODE void join(float* to, const float* from) const { to[0] = larger(to[0], from[0]); }
  ROUNDPIPE_CODE void second(const Place& at, State&, const float* joined) const {
    float x[kVector];
    unsigned code[kVector];
    const Int64 from = at.item * width + at.first;
    read(values + from, at.count, aligned, x);
    const float inverse = Form::inverse(joined[0]);
    for (int i = 0; i < kVector; ++i) x[i] = x[i] * inverse;
    Form::codes(x, code);
    Form::write(codes, from, at.count, code);
    if (at.first == 0) scales[at.item] = Form::scale(joined[0]);
  }
};

}  // namespace roundpipe::kernels
