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
    Int64 label;
    float at_label;
    float largest;
    float sum;
  };
  // Exponents are beside this: -inf - -inf is none.
  ROUNDPIPE_CODE float base_of(float largest) const { return largest == -from_bits(0x7f800000u) ? 0.0f : largest; }
  ROUNDPIPE_CODE State begin_row(Int64 item, int) const {
    const Int64 label = labels[item];
    const bool counts = label != ignored && label >= 0 && label < width;
    // A label out of range has no logit: its loss is NaN.
    const float none = label == ignored ? 0.0f : from_bits(0x7fc00000u);
    return {label, counts ? to_float(logits[item * width + label]) : none, -from_bits(0x7f800000u), 0.0f};
  }
  ROUNDPIPE_CODE void first(const Place& at, State& state) const {
    float x[kVector];
    read(logits + at.item * width + at.first, at.count, aligned, x);
    float largest = state.largest;
    for (int i = 0; i < kVector; ++i) largest = i < at.count && x[i] > largest ? x[i] : largest;
    const float base = base_of(largest);
    float terms[kVector];
    for (int i = 0; i < kVector; ++i) terms[i] = exponential(x[i] - base);
    float sum = state.sum * exponential(state.largest - base);
    for (int i = 0; i < kVector; ++i) sum = i < at.count ? sum + terms[i] : sum;
    state.largest = largest;
    state.sum = sum;
  }
  ROUNDPIPE_CODE void numbers(const State& state, float* to) const {
    to[0] = state.largest;
    to[1] = state.sum;
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
    const bool is_ignored = state.label == ignored;
    if (at.first == 0) losses[at.item] = is_ignored ? 0.0f : largest - state.at_label + logarithm(sum);
    if (!writes) return;
    float x[kVector];
    T* const from = logits + at.item * width + at.first;
    read(from, at.count, aligned, x);
    const float share = 1.0f / sum;
    for (int i = 0; i < kVector; ++i) {
      const float one = at.first + i == state.label ? 1.0f : 0.0f;
      const float probability = exponential(x[i] - largest) * share;
      x[i] = is_ignored ? probability * 0.0f : probability - one;  // NaN stays, as in torch
    }
    write(from, at.count, aligned, x);
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
