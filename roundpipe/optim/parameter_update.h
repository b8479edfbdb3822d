#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/optim/algorithm.h>

namespace roundpipe::optim {

class ThreadPool;

// What an algorithm keeps for one parameter between steps.
struct ParameterState {
  Scalars scalars;
  // One for each name of state_names(), in that order, laid out in memory like the parameter unless factored or 8-bit.
  std::vector<at::Tensor> tensors;
};

// torch.optim's names of the tensors, for example exp_avg and exp_avg_sq. 8-bit moments: each name with its codes
// (uint8), then the name + "_scale" (fp32, one for each block).
std::vector<std::string> state_names(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format,
                                     at::IntArrayRef sizes);

// The state before the first step of a parameter like `parameter`: sizes and strides count, its values do not.
ParameterState make_state(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format,
                          const at::Tensor& parameter);

// Bytes of make_state's tensors.
int64_t state_bytes(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format, at::IntArrayRef sizes);

// One parameter's weights, before and after. All are non-overlapping and dense with the same sizes and strides.
struct Weights {
  at::Tensor before;     // fp32, bf16 or fp16
  at::Tensor after;      // the same dtype; may be the memory of `before` or, where the sizes agree, of the gradient
  at::Tensor remainder;  // int16, with bf16 weights: (weight << 16) + remainder is the fp32 master, bit for bit
  at::Tensor master;     // fp32, with fp16 weights
};

// What every gradient element is multiplied with before anything else, in fp32, one rounding each.
struct GradientScaling {
  float inverse_scale = 1;
  float clip = 1;
};

// One update of one parameter, in one pass over its memory (Adafactor takes several): reads the gradient (bf16, fp16
// or fp32, the parameter's sizes and strides), the weights before and the state; writes the weights after and the
// state. fp32 arithmetic; the same bits for any number of threads and any instruction set.
// Blocks; uses `pool`. Throws std::invalid_argument for a dtype or layout that is not listed above.
void update(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format, ParameterState& state,
            const Weights& weights, const at::Tensor& gradient, const GradientScaling& scaling, ThreadPool& pool);

// The sum of (element * inverse_scale)^2 in fp64, over fixed parts, so that it does not depend on threads; not finite
// exactly when an element is not. Blocks; uses `pool`.
double sum_of_squares(const at::Tensor& gradient, float inverse_scale, ThreadPool& pool);

// The bf16 weight nearest to each element of `master` (fp32; ties away from zero), and the remainder.
void split(const at::Tensor& master, const at::Tensor& weight, const at::Tensor& remainder, ThreadPool& pool);
// The fp32 master of each element. NaN, infinities, denormals and signed zeros come back as they went in.
void join(const at::Tensor& weight, const at::Tensor& remainder, const at::Tensor& master, ThreadPool& pool);

}  // namespace roundpipe::optim
