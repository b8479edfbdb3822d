#pragma once

#include <cstdint>

#include <roundpipe/optim/coefficients.h>

// The inner loops, compiled from kernels.inl once for each instruction set. They use no torch and never allocate.
namespace roundpipe::optim::kernels {

// The number of elements that a kernel reads before it writes any of them; also the block size of 8-bit moments.
constexpr int64_t kChunk = 256;

enum class Element : uint8_t { kFloat32, kBFloat16, kFloat16 };

// Chooses random numbers, see random_key().
struct RandomKey {
  uint32_t first = 0;
  uint32_t second = 0;
};

// The memory of a parameter's numbers: dense arrays in the same order.
struct Memory {
  Element gradient_type = Element::kFloat32;
  Element weight_type = Element::kFloat32;
  const void* gradient = nullptr;
  const void* before = nullptr;
  void* after = nullptr;         // may be the memory of `before`, or of a gradient with equally large elements
  int16_t* remainder = nullptr;  // with bf16 weights; or, instead:
  int8_t* short_remainder = nullptr;
  float* master = nullptr;  // with fp16 weights
  void* states[4] = {};     // in the order of state_names
  float inverse_scale = 1;
  float clip = 1;
  // With a short remainder: what its rounding depends on; the place in the parameter of element 0 counts as well.
  RandomKey rounding;
  int64_t first_element = 0;
};

// Adafactor's estimate of a variance: row * column / row_mean, not below `least`.
struct VarianceFactors {
  float row = 1;
  float row_mean = 1;
  float least = 0;
};

// Ranges [begin, end) count elements. Ranges of update* begin at a multiple of kChunk.
struct Kernels {
  void (*update)(const Coefficients& k, const Memory& memory, int64_t begin, int64_t end);
  void (*update_8bit)(const Coefficients& k, const Memory& memory, int64_t begin, int64_t end);
  // The sum of (element * inverse_scale)^2 in fp64, in an order that depends only on the range.
  double (*sum_of_squares)(Element type, const void* gradient, float inverse_scale, int64_t begin, int64_t end);
  void (*split)(const float* master, uint16_t* weight, int16_t* remainder, int64_t begin, int64_t end);
  void (*join)(const uint16_t* weight, const int16_t* remainder, float* master, int64_t begin, int64_t end);
  // For algorithms that visit a parameter in an order of their own: any range of at most kChunk elements.
  void (*load_gradient)(const Memory& memory, int64_t begin, int64_t count, float* values);
  void (*load_weights)(const Memory& memory, int64_t begin, int64_t count, float* values);
  void (*store_weights)(const Memory& memory, int64_t begin, int64_t count, const float* values);
  // For Adafactor, on chunks. add_squares returns the sum of squares in fp64 and, unless `sums` is null, adds each
  // square to it.
  double (*add_squares)(const float* values, int64_t count, double* sums);
  void (*interpolate_squares)(Interpolation to, const float* values, int64_t count, float* averages);
  void (*divide_by_root)(VarianceFactors variance, const float* column, int64_t count, float* values);
  void (*decay_and_add)(float decay, float rate, const float* update, int64_t count, float* p);
  // For Muon, on chunks: moves `buffer` towards the gradient `g`, and writes in bf16 the place between the two, or the
  // buffer without `nesterov`.
  void (*muon_direction)(Interpolation towards_gradient, Interpolation ahead, bool nesterov, const float* g,
                         int64_t count, float* buffer, uint16_t* direction);
};

namespace baseline {
extern const Kernels table;
}
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
namespace neon {
extern const Kernels table;
}

}  // namespace roundpipe::optim::kernels
