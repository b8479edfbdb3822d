// The cross-entropy of each row of logits, and its gradient in the logits' place. The first sweep keeps a lane's
// largest logit and the sum of exponentials beside it (Milakov and Gimelshein, "Online normalizer calculation for
// softmax", 2018); the second one, if gradients are wanted, writes softmax - 1 at the label.
namespace roundpipe::kernels {

template <typename T>
struct CrossEntropy : PlainKernel {
  static constexpr int kNumbers = 2;
  Int64 items;  // tokens
  int width;    // vocabulary
  int lanes;
  bool aligned;
  bool writes;
  Int64 ignored;  // this label gives neither loss nor gradient
  T* logits;
  const Int64* labels;
  float* losses;
  ROUNDPIPE_ADDRESSES(logits, labels, losses)

  struct State {
    float at_label;
    float largest;
    float sums[kVector];  // of exponentials, beside the largest one; apart, so that none waits for another
    int label;            // -1: none
    bool is_ignored;
  };
  // Exponents are beside this: -inf - -inf is none.
  ROUNDPIPE_CODE float base_of(float largest) const { return largest == -from_bits(0x7f800000u) ? 0.0f : largest; }
  ROUNDPIPE_CODE State begin_row(Int64 item, int) const {
    const Int64 label = labels[item];
    const bool is_ignored = label == ignored, counts = !is_ignored && label >= 0 && label < width;
    // A label out of range has no logit: its loss is NaN.
    const float none = is_ignored ? 0.0f : from_bits(0x7fc00000u);
    State state{counts ? to_float(logits[item * width + label]) : none,
                -from_bits(0x7f800000u),
                {},
                counts ? static_cast<int>(label) : -1,
                is_ignored};
    for (int i = 0; i < kVector; ++i) state.sums[i] = 0.0f;
    return state;
  }
  ROUNDPIPE_CODE void first(const Place& at, State& state) const {
    float x[kVector];
    read(logits + at.item * width + at.first, at.count, aligned, x);
    int above = 0;
    for (int i = 0; i < kVector; ++i) above += i < at.count && x[i] > state.largest ? 1 : 0;
    if (above > 0) {  // seldom, after a row's beginning
      float largest = state.largest;
      for (int i = 0; i < kVector; ++i) largest = i < at.count && x[i] > largest ? x[i] : largest;
      const float share = exponential(state.largest - largest);
      for (int i = 0; i < kVector; ++i) state.sums[i] = state.sums[i] * share;
      state.largest = largest;
    }
    exponentials_below(x, base_of(state.largest));
    for (int i = 0; i < kVector; ++i) state.sums[i] = state.sums[i] + (i < at.count ? x[i] : 0.0f);
  }
  ROUNDPIPE_CODE void numbers(const State& state, float* to) const {
    const float* const sums = state.sums;
    to[0] = state.largest;
    to[1] = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
  }
  ROUNDPIPE_CODE void join(float* to, const float* from) const {
    const float largest = to[0] > from[0] ? to[0] : from[0];
    const float base = base_of(largest);
    const float own = to[1] * exponential(to[0] - base), other = from[1] * exponential(from[0] - base);
    to[0] = largest;
    to[1] = own + other;
  }
  ROUNDPIPE_CODE void second(const Place& at, State& state, const float* joined) const {
    const float largest = joined[0], sum = joined[1];
    if (at.first == 0) losses[at.item] = state.is_ignored ? 0.0f : largest - state.at_label + logarithm(sum);
    if (!writes) return;
    float x[kVector];
    T* const from = logits + at.item * width + at.first;
    read(from, at.count, aligned, x);
    const float share = (1.0f / sum) * (state.is_ignored ? 0.0f : 1.0f);  // NaN stays, as in torch
    exponentials_below(x, largest);
    for (int i = 0; i < kVector; ++i) x[i] = x[i] * share;
    write(from, at.count, aligned, x);
    const int label = state.label - at.first;
    if (label < 0 || label >= at.count) return;
    float probability = 0.0f;
    for (int i = 0; i < kVector; ++i) probability = i == label ? x[i] : probability;
    round_to(from[label], probability - 1.0f);
  }
};

// sums += addends, in fp32.
template <typename T>
struct WideSum : PlainKernel {
  Int64 items;
  int width;
  int lanes;
  bool aligned;
  float* sums;
  const T* addends;
  ROUNDPIPE_ADDRESSES(sums, addends)

  ROUNDPIPE_CODE void first(const Place& at, State&) const {
    float sum[kVector], addend[kVector];
    const Int64 from = at.item * width + at.first;
    read(sums + from, at.count, aligned, sum);
    read(addends + from, at.count, aligned, addend);
    for (int i = 0; i < kVector; ++i) sum[i] = sum[i] + addend[i];
    write(sums + from, at.count, aligned, sum);
  }
};

}  // namespace roundpipe::kernels
