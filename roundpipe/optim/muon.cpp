#include <roundpipe/optim/muon.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/mm.h>

#include <roundpipe/core/error.h>
#include <roundpipe/optim/coefficients.h>
#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/shards.h>
#include <roundpipe/optim/thread_pool.h>

namespace roundpipe::optim {
namespace {

using kernels::kChunk;

// Calls visit(begin, count) for the chunks of `count` elements, on all threads.
template <typename Visit>
void for_chunks(ThreadPool& pool, int64_t count, const Visit& visit) {
  pool.for_ranges(count, kShardGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kChunk) visit(at, std::min(kChunk, end - at));
  });
}

// The nearest matrix whose singular values are all near 1, by torch's operations in torch's order. Overwrites `matrix`.
at::Tensor orthogonalized(at::Tensor matrix, const Hyperparameters& hyper) {
  const bool is_tall = matrix.size(0) > matrix.size(1);
  if (is_tall) matrix = matrix.t();
  matrix.div_(at::linalg_vector_norm(matrix, 2).clamp_min(hyper.eps));
  for (int step = 0; step < static_cast<int>(hyper.ns_steps); ++step) {
    const at::Tensor gram = at::mm(matrix, matrix.t());
    const at::Tensor update = at::addmm(gram, gram, gram, hyper.ns_b, hyper.ns_c);
    matrix = at::addmm(matrix, update, matrix, hyper.ns_a);
  }
  return is_tall ? matrix.t() : matrix;
}

// Of a matrix, so that updates of all shapes are of about the same size.
double adjusted_rate(const Hyperparameters& hyper, int64_t rows, int64_t columns) {
  const auto height = static_cast<double>(rows), width = static_cast<double>(columns);
  if (hyper.match_rms_adamw) return hyper.lr * (0.2 * std::sqrt(std::max(height, width)));
  return hyper.lr * std::sqrt(std::max(1.0, height / width));
}

// Moves the momentum, and writes in bf16 what the update is made from.
void take_in(const Hyperparameters& hyper, const kernels::Memory& memory, const at::Tensor& direction,
             ThreadPool& pool) {
  const kernels::Kernels& kernels = current_kernels();
  const Interpolation towards_gradient = interpolation(1 - hyper.momentum);
  const Interpolation ahead = interpolation(hyper.momentum);
  auto* const buffer = static_cast<float*>(memory.states[0]);
  auto* const target = static_cast<uint16_t*>(direction.mutable_data_ptr());
  for_chunks(pool, direction.numel(), [&](int64_t begin, int64_t count) {
    alignas(64) float g[kChunk];
    kernels.load_gradient(memory, begin, count, g);
    kernels.muon_direction(towards_gradient, ahead, hyper.nesterov, g, count, buffer + begin, target + begin);
  });
}

void apply(const Hyperparameters& hyper, double rate, const kernels::Memory& memory, const at::Tensor& update,
           ThreadPool& pool) {
  const kernels::Kernels& kernels = current_kernels();
  const auto decay = static_cast<float>(1 - hyper.lr * hyper.weight_decay);
  kernels::Memory of_update;
  of_update.gradient_type = kernels::Element::kBFloat16;
  of_update.gradient = update.const_data_ptr();
  for_chunks(pool, update.numel(), [&](int64_t begin, int64_t count) {
    alignas(64) float values[kChunk];
    alignas(64) float p[kChunk];
    kernels.load_gradient(of_update, begin, count, values);
    kernels.load_weights(memory, begin, count, p);
    kernels.decay_and_add(decay, static_cast<float>(-rate), values, count, p);
    kernels.store_weights(memory, begin, count, p);
  });
}

}  // namespace

bool steps_by_muon(Algorithm algorithm, const Hyperparameters& hyper) {
  return algorithm == Algorithm::kMuon && hyper.use_muon;
}

void check_sizes(Algorithm algorithm, const Hyperparameters& hyper, at::IntArrayRef sizes, const std::string& name) {
  if (!steps_by_muon(algorithm, hyper) || sizes.size() == 2 || sizes.size() == 3) return;
  throw std::invalid_argument(
      concat("[optim] parameter '", name, "' is of shape ", sizes,
             ", expected a matrix, or a stack of matrices, which is what Muon is for; let AdamW step it, by a group "
             "with use_muon off"));
}

void muon_step(const Hyperparameters& hyper, Scalars& scalars, const kernels::Memory& memory, const at::Tensor& like,
               ThreadPool& pool) {
  scalars.step += 1;
  if (like.numel() == 0) return;
  const at::NoGradGuard no_grad;
  at::get_num_threads();  // lets this thread's products use as many threads as torch has been given
  const at::Tensor direction = at::empty_strided(like.sizes(), like.strides(), like.options().dtype(at::kBFloat16));
  take_in(hyper, memory, direction, pool);
  if (like.dim() == 2) {
    direction.copy_(orthogonalized(direction, hyper));
  } else {
    for (const at::Tensor& matrix : direction.unbind()) matrix.copy_(orthogonalized(matrix, hyper));
  }
  apply(hyper, adjusted_rate(hyper, like.size(-2), like.size(-1)), memory, direction, pool);
}

}  // namespace roundpipe::optim
