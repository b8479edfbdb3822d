#include <roundpipe/optim/adafactor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numeric>
#include <vector>

#include <c10/util/accumulate.h>

#include <roundpipe/optim/coefficients.h>
#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/thread_pool.h>

namespace roundpipe::optim {
namespace {

using kernels::kChunk;

constexpr int64_t kPartElements = 65536;
constexpr int64_t kPartsPerMatrix = 16;  // bounds the memory of the parts' column sums

float interpolate(Interpolation to, float start, float end) {
  return std::fma(to.coefficient, end - start, to.from_end ? end : start);
}

// The parameter as a batch of matrices, each cut into parts of whole rows. The parts depend only on the shape; sums are
// taken inside a part, then over parts, in order, so that they do not depend on threads. A vector is cut as a matrix of
// one column.
struct Parts {
  explicit Parts(at::IntArrayRef sizes) : factored(sizes.size() > 1) {
    const int64_t elements = c10::multiply_integers(sizes);
    columns = factored ? sizes[sizes.size() - 1] : 1;
    rows = factored ? sizes[sizes.size() - 2] : elements;
    matrices = elements / (rows * columns);
    const int64_t most = factored ? kPartsPerMatrix : rows;
    part_rows = std::max((kPartElements + columns - 1) / columns, (rows + most - 1) / most);
    parts_per_matrix = (rows + part_rows - 1) / part_rows;
  }

  int64_t count() const { return matrices * parts_per_matrix; }
  int64_t elements() const { return matrices * rows * columns; }
  int64_t matrix(int64_t part) const { return part / parts_per_matrix; }
  // Rows are numbered over all matrices.
  int64_t first_row(int64_t part) const { return matrix(part) * rows + part % parts_per_matrix * part_rows; }
  int64_t end_row(int64_t part) const {
    return matrix(part) * rows + std::min((part % parts_per_matrix + 1) * part_rows, rows);
  }

  bool factored;
  int64_t matrices, rows, columns, part_rows, parts_per_matrix;
};

class Step {
 public:
  Step(const Hyperparameters& hyper, const kernels::Memory& memory, at::IntArrayRef sizes, ThreadPool& pool)
      : hyper_(hyper), memory_(memory), parts_(sizes), pool_(pool), kernels_(current_kernels()) {
    least_variance_ = static_cast<float>(hyper.eps * hyper.eps);
    for (int i = 0; i < 2; ++i) variance_[i] = static_cast<float*>(memory.states[i]);
  }

  void run(double step) {
    const Interpolation weight = interpolation(std::pow(step, hyper_.beta2_decay));
    const double weight_norm = parts_.factored ? take_in_factored(weight) : take_in_vector(weight);
    const double update_norm = sum([&](int64_t part) { return update_squares(part); });
    const double root_elements = std::sqrt(static_cast<double>(parts_.elements()));
    const double alpha =
        std::max(hyper_.eps2, std::sqrt(weight_norm) / root_elements) * std::min(hyper_.lr, 1 / std::sqrt(step));
    const double denominator = std::max(1.0, std::sqrt(update_norm) / (root_elements * hyper_.clip_threshold));
    const auto rate = static_cast<float>((hyper_.maximize ? alpha : -alpha) / denominator);
    for_parts([&](int64_t part) { apply(part, rate); });
  }

 private:
  // Calls work(part) for each part, on all threads.
  template <typename Work>
  void for_parts(const Work& work) {
    const int64_t part_elements = parts_.elements() / parts_.count();
    const int64_t grain = std::max<int64_t>(1, kPartElements / std::max<int64_t>(1, part_elements));
    pool_.for_ranges(parts_.count(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t part = begin; part < end; ++part) work(part);
    });
  }

  // The sum over parts of term(part).
  template <typename Term>
  double sum(const Term& term) {
    std::vector<double> terms(static_cast<size_t>(parts_.count()));
    for_parts([&](int64_t part) { terms[part] = term(part); });
    return std::accumulate(terms.begin(), terms.end(), 0.0);
  }

  // Calls visit(row, column, begin, count) for the chunks of a part; each lies within one row of a matrix.
  template <typename Visit>
  void for_chunks(int64_t part, const Visit& visit) {
    const int64_t first = parts_.first_row(part);
    const int64_t end = parts_.end_row(part);
    if (!parts_.factored) {
      for (int64_t at = first; at < end; at += kChunk) visit(int64_t{0}, at, at, std::min(kChunk, end - at));
      return;
    }
    for (int64_t row = first; row < end; ++row) {
      for (int64_t column = 0; column < parts_.columns; column += kChunk) {
        visit(row, column, row * parts_.columns + column, std::min(kChunk, parts_.columns - column));
      }
    }
  }

  double weight_squares(int64_t begin, int64_t count) {
    alignas(64) float p[kChunk];
    kernels_.load_weights(memory_, begin, count, p);
    return kernels_.add_squares(p, count, nullptr);
  }

  // Updates row_var and col_var with the gradient. Returns the sum of the squared weights.
  double take_in_factored(Interpolation weight) {
    std::vector<double> row_squares(static_cast<size_t>(parts_.matrices * parts_.rows));
    std::vector<double> column_squares(static_cast<size_t>(parts_.count() * parts_.columns));
    const double weight_squares_sum = sum([&](int64_t part) {
      double* const columns = column_squares.data() + part * parts_.columns;
      double weights = 0;
      for_chunks(part, [&](int64_t row, int64_t column, int64_t begin, int64_t count) {
        alignas(64) float g[kChunk];
        kernels_.load_gradient(memory_, begin, count, g);
        row_squares[row] += kernels_.add_squares(g, count, columns + column);
        weights += weight_squares(begin, count);
      });
      return weights;
    });
    for (size_t row = 0; row < row_squares.size(); ++row) {
      const auto mean = static_cast<float>(row_squares[row] / static_cast<double>(parts_.columns));
      variance_[0][row] = interpolate(weight, variance_[0][row], mean);
    }
    row_means_.resize(static_cast<size_t>(parts_.matrices));
    for (int64_t matrix = 0; matrix < parts_.matrices; ++matrix) {
      for (int64_t column = 0; column < parts_.columns; ++column) {
        double squares = 0;
        for (int64_t part = 0; part < parts_.parts_per_matrix; ++part) {
          squares += column_squares[(matrix * parts_.parts_per_matrix + part) * parts_.columns + column];
        }
        float& variance = variance_[1][matrix * parts_.columns + column];
        variance = interpolate(weight, variance, static_cast<float>(squares / static_cast<double>(parts_.rows)));
      }
      const float* const rows = variance_[0] + matrix * parts_.rows;
      const auto mean =
          static_cast<float>(std::accumulate(rows, rows + parts_.rows, 0.0) / static_cast<double>(parts_.rows));
      const auto least = static_cast<float>(hyper_.eps);
      row_means_[matrix] = mean < least ? least : mean;
    }
    return weight_squares_sum;
  }

  // Updates variance for a parameter with fewer than two dimensions. Returns the sum of the squared weights.
  double take_in_vector(Interpolation weight) {
    return sum([&](int64_t part) {
      double weights = 0;
      for_chunks(part, [&](int64_t, int64_t, int64_t begin, int64_t count) {
        alignas(64) float g[kChunk];
        kernels_.load_gradient(memory_, begin, count, g);
        kernels_.interpolate_squares(weight, g, count, variance_[0] + begin);
        weights += weight_squares(begin, count);
      });
      return weights;
    });
  }

  // Sets `values` to the gradient divided by the root of its variance estimate.
  void update_of(int64_t part, int64_t row, int64_t column, int64_t begin, int64_t count, float* values) {
    kernels_.load_gradient(memory_, begin, count, values);
    if (parts_.factored) {
      const int64_t matrix = parts_.matrix(part);
      kernels_.divide_by_root({variance_[0][row], row_means_[matrix], least_variance_},
                              variance_[1] + matrix * parts_.columns + column, count, values);
    } else {
      kernels_.divide_by_root({1, 1, least_variance_}, variance_[0] + begin, count, values);
    }
  }

  double update_squares(int64_t part) {
    double squares = 0;
    for_chunks(part, [&](int64_t row, int64_t column, int64_t begin, int64_t count) {
      alignas(64) float update[kChunk];
      update_of(part, row, column, begin, count, update);
      squares += kernels_.add_squares(update, count, nullptr);
    });
    return squares;
  }

  void apply(int64_t part, float rate) {
    const auto decay = static_cast<float>(1 - hyper_.lr * hyper_.weight_decay);
    for_chunks(part, [&](int64_t row, int64_t column, int64_t begin, int64_t count) {
      alignas(64) float update[kChunk];
      alignas(64) float p[kChunk];
      update_of(part, row, column, begin, count, update);
      kernels_.load_weights(memory_, begin, count, p);
      kernels_.decay_and_add(decay, rate, update, count, p);
      kernels_.store_weights(memory_, begin, count, p);
    });
  }

  const Hyperparameters& hyper_;
  const kernels::Memory& memory_;
  const Parts parts_;
  ThreadPool& pool_;
  const kernels::Kernels& kernels_;
  float least_variance_;
  std::array<float*, 2> variance_;  // row_var and col_var, or variance
  std::vector<float> row_means_;    // of each matrix's row_var, not below eps
};

}  // namespace

void adafactor_step(const Hyperparameters& hyper, Scalars& scalars, const kernels::Memory& memory,
                    at::IntArrayRef sizes, ThreadPool& pool) {
  scalars.step += 1;
  if (std::find(sizes.begin(), sizes.end(), 0) != sizes.end()) return;
  Step(hyper, memory, sizes, pool).run(scalars.step);
}

}  // namespace roundpipe::optim
