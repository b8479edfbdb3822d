#include <roundpipe/optim/parameter_update.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <stdexcept>

#include <c10/util/accumulate.h>
#include <c10/util/strides.h>

#include <roundpipe/core/error.h>
#include <roundpipe/memory/host_arena.h>
#include <roundpipe/optim/adafactor.h>
#include <roundpipe/optim/coefficients.h>
#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/masters.h>
#include <roundpipe/optim/muon.h>
#include <roundpipe/optim/shards.h>
#include <roundpipe/optim/thread_pool.h>

namespace roundpipe::optim {
namespace {

using kernels::Element;
using kernels::kChunk;

// The work that one thread takes at a time. Waking another thread does not pay for smaller tensors.
constexpr int64_t kGrain = kShardGrain;

// AdamW steps the groups of Muon that are not for Muon.
Algorithm rule_of_group(Algorithm algorithm, const Hyperparameters& hyper) {
  return algorithm == Algorithm::kMuon && !steps_by_muon(algorithm, hyper) ? Algorithm::kAdamW : algorithm;
}

int64_t blocks(int64_t elements) { return (elements + kChunk - 1) / kChunk; }

void check_format(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format) {
  if (format == MomentFormat::kFloat32) return;
  const bool adam = algorithm == Algorithm::kAdam || algorithm == Algorithm::kAdamW;
  if (!adam || hyper.amsgrad) {
    throw std::invalid_argument(
        "[optim] 8-bit moments are for Adam and AdamW without amsgrad; use fp32 moments for the others");
  }
}

Element element_of(const at::Tensor& tensor, const char* where, const char* what) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return Element::kFloat32;
    case at::kBFloat16:
      return Element::kBFloat16;
    case at::kHalf:
      return Element::kFloat16;
    default:
      throw std::invalid_argument(
          concat("[", where, "] ", what, " is ", tensor.scalar_type(), ", expected float32, bfloat16 or float16"));
  }
}

// Strides of dimensions with one element do not count.
bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  for (int64_t dim = 0; dim < a.dim(); ++dim) {
    if (a.size(dim) > 1 && a.stride(dim) != b.stride(dim)) return false;
  }
  return true;
}

void check_dense(const at::Tensor& tensor, const char* where, const char* what) {
  if (!tensor.defined() || !tensor.device().is_cpu() || tensor.layout() != at::kStrided ||
      !tensor.is_non_overlapping_and_dense()) {
    throw std::invalid_argument(
        concat("[", where, "] ", what, " must be a dense tensor on the host whose elements fill its memory; copy it"));
  }
}

void check_like(const at::Tensor& tensor, const at::Tensor& like, at::ScalarType dtype, const char* where,
                const char* what) {
  check_dense(tensor, where, what);
  if (tensor.scalar_type() != dtype || (tensor.numel() > 0 && !same_layout(tensor, like))) {
    throw std::invalid_argument(concat("[", where, "] ", what, " is ", tensor.scalar_type(), " ", tensor.sizes(),
                                       " with strides ", tensor.strides(), ", expected ", dtype, " ", like.sizes(),
                                       " with strides ", like.strides()));
  }
}

void check_weights(const Weights& weights) {
  const char* const where = "update";
  check_dense(weights.before, where, "the weight before");
  check_like(weights.after, weights.before, weights.before.scalar_type(), where, "the weight after");
  const Element type = element_of(weights.before, where, "the weight");
  if (weights.remainder.defined() != (type == Element::kBFloat16)) {
    throw std::invalid_argument(
        "[update] expected a remainder with bfloat16 weights and with no others; pass it only then");
  }
  if (weights.master.defined() != (type == Element::kFloat16)) {
    throw std::invalid_argument(
        "[update] expected a master with float16 weights and with no others; pass it only then");
  }
  if (weights.remainder.defined()) {
    const bool is_short = weights.remainder.scalar_type() == at::kChar;
    check_like(weights.remainder, weights.before, is_short ? at::kChar : at::kShort, where, "the remainder");
  }
  if (weights.master.defined()) check_like(weights.master, weights.before, at::kFloat, where, "the master");
}

at::Tensor zeros(const MakeTensor& make, at::IntArrayRef sizes, at::ScalarType dtype) {
  return make(sizes, c10::contiguous_strides(sizes), dtype).zero_();
}

at::Tensor zeros_like_layout(const MakeTensor& make, const at::Tensor& parameter) {
  if (!parameter.is_non_overlapping_and_dense()) return zeros(make, parameter.sizes(), at::kFloat);
  return make(parameter.sizes(), parameter.strides(), at::kFloat).zero_();
}

// Sizes of row_var and col_var.
std::vector<std::vector<int64_t>> factored_sizes(at::IntArrayRef sizes) {
  std::vector<int64_t> rows = sizes.vec();
  std::vector<int64_t> columns = sizes.vec();
  rows[rows.size() - 1] = 1;
  columns[columns.size() - 2] = 1;
  return {rows, columns};
}

void check_state(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format, const ParameterState& state,
                 const at::Tensor& weight) {
  const std::vector<std::string> names = state_names(algorithm, hyper, format, weight.sizes());
  if (state.tensors.size() != names.size()) {
    throw std::invalid_argument(concat("[update] the state has ", state.tensors.size(), " tensors, expected ",
                                       names.size(), "; make it with make_state and the same hyperparameters"));
  }
  const bool factored = algorithm == Algorithm::kAdafactor && weight.dim() > 1;
  for (size_t i = 0; i < names.size(); ++i) {
    const at::Tensor& tensor = state.tensors[i];
    if (!factored && format == MomentFormat::kFloat32) {
      check_like(tensor, weight, at::kFloat, "update", names[i].c_str());
      continue;
    }
    const bool codes = format == MomentFormat::kBlockwise8Bit && i % 2 == 0;
    const int64_t expected = factored ? c10::multiply_integers(factored_sizes(weight.sizes())[i])
                             : codes  ? kernels::kChunk * blocks(weight.numel())
                                      : blocks(weight.numel());
    check_dense(tensor, "update", names[i].c_str());
    if (tensor.scalar_type() != (codes ? at::kByte : at::kFloat) || tensor.numel() != expected ||
        (!codes && !tensor.is_contiguous())) {
      throw std::invalid_argument(concat("[update] ", names[i], " is ", tensor.scalar_type(), " ", tensor.sizes(),
                                         ", expected ", expected, " elements of ", codes ? "uint8" : "float32",
                                         "; make the state with make_state"));
    }
  }
}

kernels::Memory memory_of(const ParameterState& state, const Weights& weights, const at::Tensor& gradient,
                          const GradientScaling& scaling) {
  kernels::Memory memory;
  memory.gradient_type = element_of(gradient, "update", "the gradient");
  memory.weight_type = element_of(weights.before, "update", "the weight");
  memory.gradient = gradient.const_data_ptr();
  memory.before = weights.before.const_data_ptr();
  memory.after = weights.after.mutable_data_ptr();
  if (weights.remainder.defined() && weights.remainder.scalar_type() == at::kChar) {
    memory.short_remainder = weights.remainder.mutable_data_ptr<int8_t>();
    memory.rounding = random_key(weights.number, state.scalars.step);
    memory.first_element = weights.first_element;
  } else if (weights.remainder.defined()) {
    memory.remainder = weights.remainder.mutable_data_ptr<int16_t>();
  }
  if (weights.master.defined()) memory.master = weights.master.mutable_data_ptr<float>();
  for (size_t i = 0; i < state.tensors.size(); ++i) memory.states[i] = state.tensors[i].mutable_data_ptr();
  memory.inverse_scale = scaling.inverse_scale;
  memory.clip = scaling.clip;
  return memory;
}

at::Tensor contiguous_if_defined(const at::Tensor& tensor) { return tensor.defined() ? tensor.contiguous() : tensor; }

// Adafactor needs rows and columns in order; a parameter with another layout is copied.
void update_adafactor(const Hyperparameters& hyper, ParameterState& state, const Weights& weights,
                      const at::Tensor& gradient, const GradientScaling& scaling, ThreadPool& pool) {
  if (weights.before.dim() < 2 || weights.before.is_contiguous()) {
    const kernels::Memory memory = memory_of(state, weights, gradient, scaling);
    adafactor_step(hyper, state.scalars, memory, weights.before.sizes(), pool);
    return;
  }
  const Weights copy{
      weights.before.contiguous(),           weights.after.contiguous(), contiguous_if_defined(weights.remainder),
      contiguous_if_defined(weights.master), weights.first_element,      weights.number};
  const at::Tensor gradient_copy = gradient.contiguous();
  const kernels::Memory memory = memory_of(state, copy, gradient_copy, scaling);
  adafactor_step(hyper, state.scalars, memory, weights.before.sizes(), pool);
  weights.after.copy_(copy.after);
  if (weights.remainder.defined()) weights.remainder.copy_(copy.remainder);
  if (weights.master.defined()) weights.master.copy_(copy.master);
}

void check_split(const at::Tensor& master, const at::Tensor& weight, const at::Tensor& remainder, const char* where) {
  check_dense(master, where, "the master");
  check_like(master, master, at::kFloat, where, "the master");
  check_like(weight, master, at::kBFloat16, where, "the weight");
  check_like(remainder, master, at::kShort, where, "the remainder");
}

uint16_t* bits_of(const at::Tensor& weight) { return static_cast<uint16_t*>(weight.mutable_data_ptr()); }

}  // namespace

std::vector<std::string> state_names(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format,
                                     at::IntArrayRef sizes) {
  check_format(algorithm, hyper, format);
  if (format == MomentFormat::kBlockwise8Bit) return {"exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale"};
  std::vector<std::string> names;
  switch (rule_of_group(algorithm, hyper)) {
    case Algorithm::kAdam:
    case Algorithm::kAdamW:
      names = {"exp_avg", "exp_avg_sq"};
      if (hyper.amsgrad) names.emplace_back("max_exp_avg_sq");
      return names;
    case Algorithm::kSGD:
      if (hyper.momentum != 0) names.emplace_back("momentum_buffer");
      return names;
    case Algorithm::kAdagrad:
      return {"sum"};
    case Algorithm::kAdadelta:
      return {"square_avg", "acc_delta"};
    case Algorithm::kAdamax:
      return {"exp_avg", "exp_inf"};
    case Algorithm::kNAdam:
    case Algorithm::kRAdam:
      return {"exp_avg", "exp_avg_sq"};
    case Algorithm::kRMSprop:
      names = {"square_avg"};
      if (hyper.momentum > 0) names.emplace_back("momentum_buffer");
      if (hyper.centered) names.emplace_back("grad_avg");
      return names;
    case Algorithm::kRprop:
      return {"prev", "step_size"};
    case Algorithm::kASGD:
      return {"ax"};
    case Algorithm::kAdafactor:
      if (sizes.size() > 1) return {"row_var", "col_var"};
      return {"variance"};
    case Algorithm::kLion:
      return {"exp_avg"};
    case Algorithm::kMuon:
      return {"momentum_buffer"};
  }
  throw std::invalid_argument("[optim] unknown algorithm");
}

// All update threads read and write state, so it lies in the arena, which spreads it over the memory nodes.
at::Tensor make_in_arena(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype) {
  return memory::empty_strided(memory::HostArena::pageable(), sizes, strides, dtype);
}

ParameterState make_state(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format,
                          const at::Tensor& parameter, const MakeTensor& make) {
  const std::vector<std::string> names = state_names(algorithm, hyper, format, parameter.sizes());
  ParameterState state;
  if (format == MomentFormat::kBlockwise8Bit) {
    for (size_t i = 0; i < names.size(); i += 2) {
      state.tensors.push_back(zeros(make, {kernels::kChunk * blocks(parameter.numel())}, at::kByte));
      state.tensors.push_back(zeros(make, {blocks(parameter.numel())}, at::kFloat));
    }
  } else if (algorithm == Algorithm::kAdafactor && parameter.dim() > 1) {
    for (const auto& sizes : factored_sizes(parameter.sizes())) state.tensors.push_back(zeros(make, sizes, at::kFloat));
  } else {
    for (size_t i = 0; i < names.size(); ++i) state.tensors.push_back(zeros_like_layout(make, parameter));
  }
  if (algorithm == Algorithm::kAdagrad) state.tensors[0].fill_(hyper.initial_accumulator_value);
  if (algorithm == Algorithm::kRprop) state.tensors[1].fill_(hyper.lr);
  return state;
}

int64_t state_bytes(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format, at::IntArrayRef sizes) {
  const auto tensors = static_cast<int64_t>(state_names(algorithm, hyper, format, sizes).size());
  const int64_t elements = c10::multiply_integers(sizes);
  if (format == MomentFormat::kBlockwise8Bit) return tensors / 2 * (kernels::kChunk + 4) * blocks(elements);
  if (algorithm == Algorithm::kAdafactor && sizes.size() > 1) {
    int64_t bytes = 0;
    for (const auto& factor : factored_sizes(sizes)) bytes += 4 * c10::multiply_integers(factor);
    return bytes;
  }
  return tensors * 4 * elements;
}

double update_traffic(Algorithm algorithm, const Hyperparameters& hyper, StateFormat format, c10::ScalarType weights) {
  constexpr int64_t kSide = 4096;
  const std::optional<c10::ScalarType> rest = remainder_dtype(weights, format.masters);
  if (!rest && weights != at::kFloat)
    throw std::invalid_argument(
        concat("[update_traffic] weights are ", c10::toString(weights), ", expected Float, BFloat16 or Half"));
  const auto weight = static_cast<double>(c10::elementSize(weights));
  const double master = weight + (rest ? static_cast<double>(c10::elementSize(*rest)) : 0);
  const double state =
      static_cast<double>(state_bytes(algorithm, hyper, format.moments, {kSide, kSide})) / (kSide * kSide);
  // Adafactor reads gradients three times and masters twice, see adafactor.cpp.
  const bool passes = algorithm == Algorithm::kAdafactor;
  // Muon writes and reads the update in bf16, and its transpose or copy; products are bounded by arithmetic.
  const double update = steps_by_muon(algorithm, hyper) ? 4 * 2.0 : 0;
  return ((passes ? 3 : 1) * weight + ((passes ? 2 : 1) + 1) * master + 2 * state + update) / weight;
}

void update(Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format, ParameterState& state,
            const Weights& weights, const at::Tensor& gradient, const GradientScaling& scaling, ThreadPool& pool) {
  check_weights(weights);
  element_of(gradient, "update", "the gradient");
  check_like(gradient, weights.before, gradient.scalar_type(), "update", "the gradient");
  check_state(algorithm, hyper, format, state, weights.before);
  if (algorithm == Algorithm::kAdafactor) {
    update_adafactor(hyper, state, weights, gradient, scaling, pool);
    return;
  }
  const kernels::Memory memory = memory_of(state, weights, gradient, scaling);
  if (steps_by_muon(algorithm, hyper)) {
    check_sizes(algorithm, hyper, weights.before.sizes(), "update");
    muon_step(hyper, state.scalars, memory, weights.before, pool);
    return;
  }
  Coefficients coefficients = advance(rule_of_group(algorithm, hyper), hyper, state.scalars);
  coefficients.first_element = weights.first_element;
  const kernels::Kernels& kernels = current_kernels();
  const auto kernel = format == MomentFormat::kFloat32 ? kernels.update : kernels.update_8bit;
  pool.for_ranges(weights.before.numel(), kGrain,
                  [&](int64_t begin, int64_t end) { kernel(coefficients, memory, begin, end); });
}

int64_t sum_parts(int64_t elements) { return (elements + kGrain - 1) / kGrain; }

std::vector<double> sums_of_squares(const at::Tensor& gradient, float inverse_scale, ThreadPool& pool) {
  check_dense(gradient, "sum_of_squares", "the gradient");
  const Element type = element_of(gradient, "sum_of_squares", "the gradient");
  const void* const memory = gradient.const_data_ptr();
  const kernels::Kernels& kernels = current_kernels();
  const int64_t count = gradient.numel();
  std::vector<double> parts(static_cast<size_t>(sum_parts(count)));
  pool.for_ranges(count, kGrain, [&](int64_t begin, int64_t end) {
    for (int64_t at = begin; at < end; at += kGrain) {
      parts[at / kGrain] = kernels.sum_of_squares(type, memory, inverse_scale, at, std::min(at + kGrain, end));
    }
  });
  return parts;
}

double sum_of_squares(const at::Tensor& gradient, float inverse_scale, ThreadPool& pool) {
  const std::vector<double> parts = sums_of_squares(gradient, inverse_scale, pool);
  return std::accumulate(parts.begin(), parts.end(), 0.0);
}

void split(const at::Tensor& master, const at::Tensor& weight, const at::Tensor& remainder, ThreadPool& pool) {
  check_split(master, weight, remainder, "split");
  const kernels::Kernels& kernels = current_kernels();
  const auto* const from = master.const_data_ptr<float>();
  auto* const low = remainder.mutable_data_ptr<int16_t>();
  pool.for_ranges(master.numel(), kGrain,
                  [&, to = bits_of(weight)](int64_t begin, int64_t end) { kernels.split(from, to, low, begin, end); });
}

void join(const at::Tensor& weight, const at::Tensor& remainder, const at::Tensor& master, ThreadPool& pool) {
  check_split(master, weight, remainder, "join");
  const kernels::Kernels& kernels = current_kernels();
  const auto* const low = remainder.const_data_ptr<int16_t>();
  auto* const to = master.mutable_data_ptr<float>();
  pool.for_ranges(master.numel(), kGrain,
                  [&, from = bits_of(weight)](int64_t begin, int64_t end) { kernels.join(from, low, to, begin, end); });
}

}  // namespace roundpipe::optim
