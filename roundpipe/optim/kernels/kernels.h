#pragma once

#include <cstdint>

#include <roundpipe/optim/coefficients.h>

// The inner loops, compiled once for each instruction set from kernels.inl. No torch and nothing that allocates here.
namespace roundpipe::optim::kernels {

// Elements that are worked on together, between reading all of them and writing any; also a block of 8-bit moments.
constexpr int64_t kChunk = 256;

enum class Element : uint8_t { kFloat32, kBFloat16, kFloat16 };

// Where a parameter's numbers are, as dense arrays in the same order.
struct Memory {
  Element gradient_type = Element::kFloat32;
  Element weight_type = Element::kFloat32;
  const void* gradient = nullptr;
  const void* before = nullptr;
  void* after = nullptr;         // may be the memory of `before`, or of a gradient with elements of the same size
  int16_t* remainder = nullptr;  // with bf16 weights
  float* master = nullptr;       // with fp16 weights
  void* states[4] = {};          // in the order of state_names
  float inverse_scale = 1;
  float clip = 1;
};

// Adafactor's estimate of a variance: row * column / row_mean, not below `least`.
struct VarianceFactors {
  float row = 1;
  float row_mean = 1;
  float least = 0;
};

// Ranges [begin, end) count elements; those of update* begin at a multiple of kChunk.
struct Kernels {
  void (*update)(const Coefficients& k, const Memory& memory, int64_t begin, int64_t end);
  void (*update_8bit)(const Coefficients& k, const Memory& memory, int64_t begin, int64_t end);
  // Sum of (element * inverse_scale)^2 in fp64, in an order that depends on the range only.
  double (*sum_of_squares)(Element type, const void* gradient, float inverse_scale, int64_t begin, int64_t end);
  void (*split)(const float* master, uint16_t* weight, int16_t* remainder, int64_t begin, int64_t end);
  void (*join)(const uint16_t* weight, const int16_t* remainder, float* master, int64_t begin, int64_t end);
  // For algorithms that go over a parameter in their own way: any range of at most kChunk elements.
  void (*load_gradient)(const Memory& memory, int64_t begin, int64_t count, float* values);
  void (*load_weights)(const Memory& memory, int64_t begin, int64_t count, float* values);
  void (*store_weights)(const Memory& memory, int64_t begin, int64_t count, const float* values);
  // Adafactor, on chunks. The sum of squares in fp64, each also added to `sums` unless that is null.
  double (*add_squares)(const float* values, int64_t count, double* sums);
  void (*interpolate_squares)(Interpolation to, const float* values, int64_t count, float* averages);
  void (*divide_by_root)(VarianceFactors variance, const float* column, int64_t count, float* values);
  void (*decay_and_add)(float decay, float rate, const float* update, int64_t count, float* p);
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
