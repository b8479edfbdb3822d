#include <roundpipe/quantise/nested_scales.h>

#include <cmath>
#include <stdexcept>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include <roundpipe/core/error.h>

namespace roundpipe::quantise {

using at::Tensor;

namespace {

constexpr int64_t kBlock = 256;
constexpr int64_t kMapSize = 256;
constexpr float kSmallest = 1e-38f;

int64_t blocks_of(int64_t scales) { return (scales + kBlock - 1) / kBlock; }

// One number for each of `count`, of numbers for each block.
Tensor each(const Tensor& of_blocks, int64_t count) {
  return of_blocks.unsqueeze(1).expand({-1, kBlock}).reshape(-1).slice(0, 0, count);
}

}  // namespace

std::vector<Part> nested_parts(int64_t scales) {
  return {{"_scale", at::kByte, {scales}},
          {"_scale_scale", at::kFloat, {blocks_of(scales)}},
          {"_scale_offset", at::kFloat, {1}},
          {"_scale_map", at::kFloat, {kMapSize}}};
}

Tensor dynamic_map() {
  // Decades down from 1, each with twice the numbers of the one below, halfway between equal steps.
  constexpr int kDecades = 7;
  std::vector<Tensor> parts = {at::tensor({0.0f, 1.0f}, at::kFloat)};
  for (int decade = 0; decade < kDecades; ++decade) {
    const Tensor steps = at::linspace(0.1, 1, (1 << decade) + 1, at::kFloat);
    const Tensor middles = (steps.slice(0, 0, -1) + steps.slice(0, 1)) / 2.0;
    const Tensor numbers = middles * std::pow(10.0, decade + 1 - kDecades);
    parts.push_back(numbers);
    parts.push_back(-numbers);
  }
  return std::get<0>(at::cat(parts).sort());
}

std::vector<Tensor> nest(const Tensor& scales) {
  const int64_t count = scales.numel(), blocks = blocks_of(count);
  const Tensor offset = scales.mean().view({1}), rest = scales - offset;
  const Tensor padded = at::constant_pad_nd(rest, {0, blocks * kBlock - count}).view({blocks, kBlock});
  const Tensor largest = padded.abs().amax(1), map = dynamic_map().to(scales.device());
  const Tensor scaled = rest / each(largest.clamp_min(kSmallest), count);
  const Tensor bounds = (map.slice(0, 0, -1) + map.slice(0, 1)) / 2.0;
  return {at::bucketize(scaled, bounds, /*out_int32=*/true).to(at::kByte), largest, offset, map};
}

Tensor flattened(const std::vector<Tensor>& parts) {
  const Tensor &codes = parts.at(0), &scales = parts.at(1), &offset = parts.at(2), &map = parts.at(3);
  const std::vector<Part> expected = nested_parts(codes.numel());
  for (size_t i = 0; i < expected.size(); ++i) {
    if (parts[i].scalar_type() == expected[i].dtype && parts[i].sizes() == at::IntArrayRef(expected[i].sizes)) continue;
    throw std::invalid_argument(concat("[quantise] the scales' part '", expected[i].suffix, "' is ",
                                       parts[i].scalar_type(), " ", parts[i].sizes(), ", expected ", expected[i].dtype,
                                       " ", at::IntArrayRef(expected[i].sizes)));
  }
  return map.index({codes.to(at::kLong)}) * each(scales, codes.numel()) + offset;
}

}  // namespace roundpipe::quantise
