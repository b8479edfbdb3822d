#pragma once

#include <cstring>

#include <ATen/ATen.h>

// The number of elements of two tensors with the same dtype that differ in their bits; all NaNs are equal.
inline int64_t different_bits(const at::Tensor& a, const at::Tensor& b) {
  const at::Tensor left = a.contiguous();
  const at::Tensor right = b.contiguous();
  if (left.sizes() != right.sizes() || left.scalar_type() != right.scalar_type()) return -1;
  const bool floating = left.is_floating_point();
  const at::ScalarType bits = left.element_size() == 4 ? at::kInt : left.element_size() == 2 ? at::kShort : at::kByte;
  at::Tensor same = left.view(bits) == right.view(bits);
  if (floating) same = same.logical_or(left.isnan().logical_and(right.isnan()));
  return left.numel() - same.sum().item<int64_t>();
}

// A tensor of these values, whose memory is not aligned for any vector.
inline at::Tensor unaligned(const at::Tensor& values) {
  at::Tensor memory = at::empty({values.numel() + 1}, values.options());
  return memory.narrow(0, 1, values.numel()).copy_(values);
}
