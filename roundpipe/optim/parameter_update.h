#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/optim/algorithm.h>

namespace roundpipe::optim {

class ThreadPool;

// The state of one parameter between steps.
struct ParameterState {
  Scalars scalars;
  // One for each of state_names(), in that order. They have the parameter's memory layout unless factored or 8-bit.
  std::vector<at::Tensor> tensors;
};

// torch.optim's names of the state tensors, such as exp_avg and exp_avg_sq. For 8-bit moments, each name stands for the
// codes (uint8) and is followed by the name + "_scale" (fp32, one per block).
std::vector<std::string> state_names(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format,
                                     at::IntArrayRef sizes);

// Makes an uninitialized tensor, and the one that is used where none is given: in host memory.
using MakeTensor = std::function<at::Tensor(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype)>;
at::Tensor make_in_arena(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

// Makes the state before the first step of a parameter with the sizes and strides of `parameter`; its values are not
// read.
ParameterState make_state(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format,
                          const at::Tensor& parameter, const MakeTensor& make = make_in_arena);

// The bytes of the tensors that make_state makes.
int64_t state_bytes(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format, at::IntArrayRef sizes);

// The bytes of host memory that update() reads and writes for each byte of weights, of a large matrix: gradients of the
// weights' dtype, weights before and after with the rest of their masters, and the state. New weights take the memory
// of the gradients, so nothing is read just to be overwritten. Throws std::invalid_argument for a dtype of weights that
// is neither fp32 nor bf16 nor fp16.
double update_traffic(Algorithm algorithm, const Hyperparameters& hyper, StateFormat format, c10::ScalarType weights);

// One parameter's weights, before and after an update. All are non-overlapping and dense, with the same sizes and
// strides.
struct Weights {
  at::Tensor before;  // fp32, bf16 or fp16
  at::Tensor after;   // the same dtype; may be the memory of `before`, or of a gradient with equally large elements
  // With bf16 weights. int16: (weight << 16) + remainder is the fp32 master, bit for bit. int8: (weight << 16) +
  // (remainder << 8) is; that of the weights after is rounded to 24 bits, up or down by chance.
  at::Tensor remainder;
  at::Tensor master;  // fp32, with fp16 weights
  // Of a part of a parameter: the place of its first element in memory order. A multiple of kShardGrain.
  int64_t first_element = 0;
  // With an int8 remainder: tells the parameter from others, see random_key().
  uint64_t number = 0;
};

// The factors by which every gradient element is multiplied first, in fp32, with one rounding each.
struct GradientScaling {
  float inverse_scale = 1;
  float clip = 1;
};

// Updates one parameter, in one pass over its memory (Adafactor and Muon make several). Reads the gradient (bf16, fp16
// or fp32, with the parameter's sizes and strides), the weights before and the state; writes the weights after and the
// state. Computes in fp32, with the same bits for any number of threads and any instruction set. Blocks; uses `pool`.
// Throws std::invalid_argument for a dtype or layout that is not listed above.
void update(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format, ParameterState& state,
            const Weights& weights, const at::Tensor& gradient, const GradientScaling& scaling, ThreadPool& pool);

// The sum of (element * inverse_scale)^2 in fp64, over fixed parts, so that it does not depend on threads. Not finite
// if and only if an element is not. Blocks; uses `pool`.
double sum_of_squares(const at::Tensor& gradient, float inverse_scale, ThreadPool& pool);

// The terms of that sum, which are added in order: one for each part of kShardGrain elements, see shards.h.
std::vector<double> sums_of_squares(const at::Tensor& gradient, float inverse_scale, ThreadPool& pool);
// The number of parts of so many elements.
int64_t sum_parts(int64_t elements);

// Writes the bf16 weight nearest to each element of `master` (fp32; ties away from zero) and the remainder.
void split(const at::Tensor& master, const at::Tensor& weight, const at::Tensor& remainder, ThreadPool& pool);
// Writes the fp32 master of each element. Restores NaN, infinities, denormals and signed zeros bit for bit.
void join(const at::Tensor& weight, const at::Tensor& remainder, const at::Tensor& master, ThreadPool& pool);

}  // namespace roundpipe::optim
