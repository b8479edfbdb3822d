#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace roundpipe::ops {

// sums += scale * left right, or = if it does not `add`, where `sums` [m, n] is contiguous and fp32, and the matrices,
// [m, k] and [k, n], have 16 bits or 32. Where the device has such a product, nothing of it is rounded to 16 bits;
// elsewhere it is computed some rows at a time, each rounded to the matrices' dtype, in memory for about `scratch`
// numbers. Any thread.
void add_wide_product(const at::Tensor& sums, const at::Tensor& left, const at::Tensor& right, double scale,
                      int64_t scratch, bool add = true);

// Whether a device has a product of matrices of this 16-bit dtype with an fp32 result. Not of fp16 while torch adds
// fp16 products up in fp16 (device/fp16_accumulation.h): no card has shown yet that the two work together.
bool has_wide_product(c10::DeviceType device, at::ScalarType dtype);

}  // namespace roundpipe::ops
