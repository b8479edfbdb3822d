#include <roundpipe/kernels/plain_forms.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include <roundpipe/kernels/host_sets.inl>

namespace roundpipe::kernels::plain {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

namespace {

// The gradients are operators.cpp's, and so is what is noted about writes in place.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// What a gate computes with, in fp32.
struct Gates {
  Tensor gate;
  Tensor up;
};

Gates split(const Tensor& first, const MaybeTensor& up, bool alternate) {
  if (up) return {first.to(at::kFloat), up->to(at::kFloat)};
  if (!alternate) {
    const std::vector<Tensor> halves = first.to(at::kFloat).chunk(2, -1);
    return {halves[0], halves[1]};
  }
  const Tensor pairs = first.unflatten(-1, {first.size(-1) / 2, 2}).to(at::kFloat);
  return {pairs.select(-1, 0), pairs.select(-1, 1)};
}

Gates bounded(const Gates& given, std::optional<double> alpha, double limit) {
  if (!alpha) return given;
  return {given.gate.clamp_max(limit), given.up.clamp(-limit, limit)};
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> norm(const Tensor& input, const MaybeTensor& residual, const Tensor& weight,
                                        double eps) {
  const BelowAutograd below;
  const auto dtype = input.scalar_type();
  const Tensor sum = residual ? (input.to(at::kFloat) + residual->to(at::kFloat)).to(dtype).contiguous()
                              : at::empty({0}, input.options());
  const Tensor rows = (residual ? sum : input).to(at::kFloat);
  const Tensor scales = (rows.square().mean(-1, true) + eps).rsqrt();
  const Tensor normed = (rows * scales * weight.to(at::kFloat)).to(dtype).contiguous();
  return {sum, normed, scales.flatten()};
}

std::tuple<Tensor, Tensor> norm_backward(const Tensor& normed_gradient, const MaybeTensor& sum_gradient,
                                         const Tensor& input, const Tensor& weight, const Tensor& scales,
                                         bool weight_trains) {
  const BelowAutograd below;
  const int64_t width = input.size(-1);
  const Tensor g = normed_gradient.to(at::kFloat).reshape({scales.size(0), width}),
               x = input.to(at::kFloat).reshape({scales.size(0), width});
  const Tensor scale = scales.unsqueeze(-1), weighted = g * weight.to(at::kFloat);
  const Tensor pull = (weighted * x).mean(-1, true) * scale.square();
  Tensor gradient = ((weighted - x * pull) * scale).view(input.sizes());
  if (sum_gradient) gradient = gradient + sum_gradient->to(at::kFloat);
  const Tensor sums =
      weight_trains ? (g * x * scale).sum(0).to(weight.scalar_type()) : at::empty({0}, weight.options());
  return {gradient.to(input.scalar_type()), sums};
}

Tensor turn(const Tensor& states, const Tensor& cos, const Tensor& sin, bool backward) {
  const BelowAutograd below;
  const int64_t half = states.size(3) / 2;
  const Tensor x = states.to(at::kFloat), a = x.narrow(3, 0, half), b = x.narrow(3, half, half);
  const bool whole = cos.size(2) == 2 * half;
  const auto of_half = [&](const Tensor& table, int64_t which) {
    return table.narrow(2, whole ? which * half : 0, half).unsqueeze(2).to(at::kFloat);
  };
  const Tensor cos_a = of_half(cos, 0), cos_b = of_half(cos, 1), sin_a = of_half(sin, 0), sin_b = of_half(sin, 1);
  const Tensor first = backward ? a * cos_a + b * sin_b : a * cos_a - b * sin_a;
  const Tensor second = backward ? b * cos_b - a * sin_a : b * cos_b + a * sin_b;
  return at::cat({first, second}, 3).to(states.scalar_type());
}

Tensor gate(const Tensor& first, const MaybeTensor& up, std::optional<double> alpha, double limit) {
  const BelowAutograd below;
  const auto [x, y] = bounded(split(first, up, alpha.has_value()), alpha, limit);
  const Tensor result = alpha ? (y + 1) * (x * (x * *alpha).sigmoid()) : x * x.sigmoid() * y;
  return result.to(first.scalar_type()).contiguous();
}

std::tuple<Tensor, Tensor> gate_backward(const Tensor& gradient, const Tensor& first, const MaybeTensor& up,
                                         std::optional<double> alpha, double limit) {
  const BelowAutograd below;
  const auto dtype = first.scalar_type();
  const Gates given = split(first, up, alpha.has_value());
  const auto [x, y] = bounded(given, alpha, limit);
  const Tensor d = gradient.to(at::kFloat), share = (x * alpha.value_or(1)).sigmoid();
  const Tensor slope = share * (1 + x * alpha.value_or(1) * (1 - share));
  Tensor of_gate = d * (alpha ? y + 1 : y) * slope, of_up = d * (x * share);
  if (alpha) {
    of_gate = at::where(given.gate <= limit, of_gate, 0);
    of_up = at::where((given.up <= limit).logical_and(given.up >= -limit), of_up, 0);
  }
  if (up) return {of_gate.to(dtype).contiguous(), of_up.to(dtype).contiguous()};
  const Tensor both = alpha ? at::stack({of_gate, of_up}, -1).flatten(-2) : at::cat({of_gate, of_up}, -1);
  return {both.to(dtype), at::empty({0}, first.options())};
}

Tensor token_losses(const Tensor& logits, const Tensor& labels, int64_t ignore_index, bool writes_gradient) {
  const BelowAutograd below;
  const Tensor ignored = labels == ignore_index;
  const Tensor counts = (labels >= 0).logical_and(labels < logits.size(1)).logical_and(ignored.logical_not());
  const Tensor at = at::where(counts, labels, 0).unsqueeze(1);
  const Tensor shares = logits.to(at::kFloat).log_softmax(1);
  Tensor losses = at::where(counts, -shares.gather(1, at).squeeze(1), std::numeric_limits<float>::quiet_NaN());
  losses = at::where(ignored, 0, losses);
  if (writes_gradient) {
    Tensor gradient = shares.exp();
    gradient.scatter_add_(1, at, -counts.to(at::kFloat).unsqueeze(1));
    logits.copy_(at::where(ignored.unsqueeze(1), shares.exp() * 0, gradient));
  }
  return losses;
}

void add_to(const Tensor& sums, const Tensor& addends) {
  const BelowAutograd below;
  sums.add_(addends);
}

namespace {

template <typename Form>
Tensor table_of(c10::Device device) {
  std::array<float, Form::kInByte == 1 ? 256 : 16> values;
  for (unsigned code = 0; code < values.size(); ++code) values[code] = Form::value(code);
  return at::tensor(values, at::kFloat).to(device);
}

// 2^(scale - 127); NaN for 255.
Tensor powers_of_two(const Tensor& scales) {
  const Tensor exponents = scales.to(at::kInt);
  const Tensor plain = exponents.bitwise_left_shift(23).view(at::kFloat);
  const Tensor small = at::where(exponents == 0, Mxfp4::factor(0), plain);
  return at::where(exponents == 255, Mxfp4::factor(255), small);
}

// fp32 numbers of 4-bit codes.
template <typename Form>
Tensor looked_up(const Tensor& codes, bool high_first) {
  const Tensor high = codes.bitwise_right_shift(4), low = codes.bitwise_and(15);
  const Tensor both = high_first ? at::stack({high, low}, -1) : at::stack({low, high}, -1);
  return table_of<Form>(codes.device()).index({both.flatten().to(at::kLong)});
}

}  // namespace

void decode(const Tensor& codes, const Tensor& scales, std::string_view form, int64_t block, const Tensor& numbers) {
  constexpr int64_t kAtATime = 1 << 22;
  const BelowAutograd below;
  const bool is_packed = form != "int8" && form != "fp8";
  const Tensor flat = numbers.view({-1}), flat_codes = codes.view({-1});
  const int64_t all = flat.numel(), blocks = std::max<int64_t>(1, kAtATime / block);
  for (int64_t begin = 0; begin < all; begin += blocks * block) {
    const int64_t end = std::min(all, begin + blocks * block);
    const Tensor part = is_packed ? flat_codes.slice(0, begin / 2, end / 2) : flat_codes.slice(0, begin, end);
    const Tensor given = scales.slice(0, begin / block, begin / block + blocks);
    const Tensor factors = form == "mxfp4" ? powers_of_two(given) : given;
    const Tensor values = form == "nf4"     ? looked_up<Nf4>(part, true)
                          : form == "mxfp4" ? looked_up<Mxfp4>(part, false)
                          : form == "int4"  ? looked_up<Int4>(part, false)
                          : form == "fp8"   ? table_of<Fp8>(part.device()).index({part.view(at::kByte).to(at::kLong)})
                                            : part.to(at::kFloat);
    const Tensor each = factors.unsqueeze(1).expand({-1, block}).reshape(-1).slice(0, 0, end - begin);
    flat.slice(0, begin, end).copy_(values * each);
  }
}

}  // namespace roundpipe::kernels::plain
