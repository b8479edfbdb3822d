// x / sqrt(mean(x^2) + eps) * weight over rows, and its gradients (Zhang and Sennrich, "Root Mean Square Layer
// Normalization", 2019). In fp32, with one rounding of each result.
namespace roundpipe::kernels {

// Of `input`, or of the rounded sum of `input` and `residual`, which is then written as well.
template <typename T, typename W>
struct RmsNorm : PlainKernel {
  static constexpr int kNumbers = 1;
  Int64 items;  // rows
  int width;
  int lanes;
  bool aligned;
  float eps;
  const T* input;
  const T* residual;  // null: none
  const W* weight;
  T* sum;
  T* normed;
  float* scales;  // [rows]: 1 / sqrt(mean + eps), for the gradients
  ROUNDPIPE_ADDRESSES(input, residual, weight, sum, normed, scales)

  struct State {
    float squares;
  };
  ROUNDPIPE_CODE State begin_row(Int64, int) const { return {0.0f}; }
  ROUNDPIPE_CODE void first(const Place& at, State& state) const {
    float x[kVector];
    const Int64 from = at.item * width + at.first;
    read(input + from, at.count, aligned, x);
    if (residual != nullptr) {
      float other[kVector];
      read(residual + from, at.count, aligned, other);
      for (int i = 0; i < kVector; ++i) x[i] = x[i] + other[i];
      write(sum + from, at.count, aligned, x);
      read(sum + from, at.count, aligned, x);
    }
    for (int i = 0; i < kVector; ++i) state.squares = state.squares + x[i] * x[i];
  }
  ROUNDPIPE_CODE void numbers(const State& state, float* to) const { to[0] = state.squares; }
  ROUNDPIPE_CODE void join(float* to, const float* from) const { to[0] = to[0] + from[0]; }
  ROUNDPIPE_CODE void second(const Place& at, State&, const float* joined) const {
    const float scale = 1.0f / root(joined[0] / static_cast<float>(width) + eps);
    float x[kVector], w[kVector];
    const Int64 from = at.item * width + at.first;
    read((residual != nullptr ? sum : input) + from, at.count, aligned, x);
    read(weight + at.first, at.count, aligned, w);
    for (int i = 0; i < kVector; ++i) x[i] = x[i] * scale * w[i];
    write(normed + from, at.count, aligned, x);
    if (at.first == 0) scales[at.item] = scale;
  }
};

// An item is `rows_of_item` rows, whose gradients of the weight are summed in this order.
template <typename T, typename W>
struct RmsNormBackward : PlainKernel {
  static constexpr int kNumbers = 1;
  Int64 items;
  int width;
  int lanes;
  bool aligned;
  int rows_of_item;
  Int64 all_rows;
  const T* normed_gradient;
  const T* sum_gradient;  // added to the result; null: none
  const T* input;         // of the norm
  const W* weight;
  const float* scales;
  T* gradient;
  float* weight_parts;  // [items, width]; null: not needed
  ROUNDPIPE_ADDRESSES(normed_gradient, sum_gradient, input, weight, scales, gradient, weight_parts)

  struct State {
    Int64 row;
    float dot;  // of the input and the gradient before the weight
  };
  ROUNDPIPE_CODE int most_rows() const { return rows_of_item; }
  ROUNDPIPE_CODE int rows(Int64 item) const {
    const Int64 left = all_rows - item * rows_of_item;
    return left < rows_of_item ? static_cast<int>(left) : rows_of_item;
  }
  ROUNDPIPE_CODE int floats() const { return weight_parts != nullptr ? width : 0; }
  ROUNDPIPE_CODE void begin(Int64, int lane, float* floats) const {
    if (weight_parts == nullptr) return;
    for (int vector = 0; vector < vectors_of(*this); ++vector) {
      const Place at = place_of(*this, 0, 0, lane, vector, floats);
      for (int i = 0; i < at.count; ++i) floats[at.first + i] = 0.0f;
    }
  }
  ROUNDPIPE_CODE State begin_row(Int64 item, int row) const { return {item * rows_of_item + row, 0.0f}; }
  ROUNDPIPE_CODE void first(const Place& at, State& state) const {
    float g[kVector], x[kVector], w[kVector];
    const Int64 from = state.row * width + at.first;
    read(normed_gradient + from, at.count, aligned, g);
    read(input + from, at.count, aligned, x);
    read(weight + at.first, at.count, aligned, w);
    for (int i = 0; i < kVector; ++i) state.dot = state.dot + g[i] * w[i] * x[i];
  }
  ROUNDPIPE_CODE void numbers(const State& state, float* to) const { to[0] = state.dot; }
  ROUNDPIPE_CODE void join(float* to, const float* from) const { to[0] = to[0] + from[0]; }
  ROUNDPIPE_CODE void second(const Place& at, State& state, const float* joined) const {
    const float scale = scales[state.row];
    const float pull = joined[0] / static_cast<float>(width) * scale * scale;
    float g[kVector], x[kVector], w[kVector], result[kVector];
    const Int64 from = state.row * width + at.first;
    read(normed_gradient + from, at.count, aligned, g);
    read(input + from, at.count, aligned, x);
    read(weight + at.first, at.count, aligned, w);
    for (int i = 0; i < kVector; ++i) result[i] = (g[i] * w[i] - x[i] * pull) * scale;
    if (sum_gradient != nullptr) {
      float more[kVector];
      read(sum_gradient + from, at.count, aligned, more);
      for (int i = 0; i < kVector; ++i) result[i] = result[i] + more[i];
    }
    write(gradient + from, at.count, aligned, result);
    if (weight_parts == nullptr) return;
    for (int i = 0; i < kVector; ++i) {
      if (i < at.count) at.floats[at.first + i] = at.floats[at.first + i] + g[i] * x[i] * scale;
    }
  }
  ROUNDPIPE_CODE void end(Int64 item, int lane, float* floats) const {
    if (weight_parts == nullptr) return;
    for (int vector = 0; vector < vectors_of(*this); ++vector) {
      const Place at = place_of(*this, item, 0, lane, vector, floats);
      for (int i = 0; i < at.count; ++i) weight_parts[item * width + at.first + i] = floats[at.first + i];
    }
  }
};

// The sums of the columns of `parts` [all_rows, all], some columns an item, row by row.
template <typename W>
struct ColumnSum : PlainKernel {
  Int64 items;
  int width;  // columns of an item
  int lanes;
  int all_rows;
  const float* parts;
  W* sums;
  ROUNDPIPE_ADDRESSES(parts, sums)

  ROUNDPIPE_CODE void first(const Place& at, State&) const {
    float sum[kVector];
    const Int64 column = at.item * width + at.first;
    for (int i = 0; i < kVector; ++i) sum[i] = 0.0f;
    for (int row = 0; row < all_rows; ++row) {
      for (int i = 0; i < kVector; ++i) {
        if (i < at.count) sum[i] = sum[i] + parts[row * all + column + i];
      }
    }
    for (int i = 0; i < kVector; ++i) {
      if (i < at.count) round_to(sums[column + i], sum[i]);
    }
  }
};

}  // namespace roundpipe::kernels
