#pragma once

#include <ATen/core/Tensor.h>

#include <roundpipe/ops/weight.h>

namespace roundpipe::ops {

// Which way the matrices of grouped_product() lie.
enum class Stacked : int {
  kOutputsFirst,  // [groups, outputs, inputs], as a linear layer has its weight
  kInputsFirst,   // [groups, inputs, outputs]
};

// The product of each group of rows with a matrix of its own: [rows, outputs] from `rows` [rows, inputs]. Group i ends
// before row ends[i] (int32, ascending, on the rows' device).
// Values and gradients have the bits of at::_grouped_mm. On the host, it does the same products with less of the
// host's time around each. Errors: torch's own, for what at::_grouped_mm does not take.
at::Tensor grouped_product(const at::Tensor& rows, const Weight& matrices, const at::Tensor& ends, Stacked stacked);

}  // namespace roundpipe::ops
