// Adafactor's passes over chunks. Part of kernels.inl.

// Returns the sum of squares, taken in lanes as in sum_of_squares. Adds each square to `sums` unless that is null.
double add_squares(const float* values, int64_t count, double* __restrict sums) {
  alignas(64) double squares[kChunk];
  alignas(64) double lanes[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) squares[i] = static_cast<double>(values[i]) * static_cast<double>(values[i]);
  if (sums != nullptr) {
    for (int64_t i = 0; i < count; ++i) sums[i] += squares[i];
  }
  for (int64_t i = count; i % kLanes != 0; ++i) squares[i] = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += squares[i + lane];
  }
  double sum = 0;
  for (const double lane_sum : lanes) sum += lane_sum;
  return sum;
}

void interpolate_squares(Interpolation to, const float* values, int64_t count, float* __restrict averages) {
  for (int64_t i = 0; i < count; ++i) averages[i] = interpolate(to, averages[i], values[i] * values[i]);
}

void divide_by_root(const VarianceFactors variance, const float* column, int64_t count, float* __restrict values) {
  for (int64_t i = 0; i < count; ++i) {
    float estimate = variance.row * column[i] / variance.row_mean;
    estimate = estimate < variance.least ? variance.least : estimate;
    values[i] *= 1.0F / __builtin_sqrtf(estimate);
  }
}

void decay_and_add(float decay, float rate, const float* update, int64_t count, float* __restrict p) {
  for (int64_t i = 0; i < count; ++i) p[i] = fused(rate, update[i], p[i] * decay);
}
