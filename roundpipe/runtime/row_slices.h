#pragma once

#include <cstdint>
#include <vector>

#include <roundpipe/runtime/flow.h>
#include <roundpipe/runtime/layer.h>

namespace roundpipe::runtime {

// Cuts the values between two layers into rows, so that a layer which has no memory for a whole microbatch can run on
// a part of it at a time. Rows are dimension 0 of the tensors that need gradients; what has another size there is the
// same for all rows. No function here knows what a layer does with its rows: see MicrobatchRunner.

// How many rows the microbatch has; 0 when it cannot be cut: there is but one row, or gradients go into something that
// all rows share.
int64_t rows_of(const Flow& flow);

// Rows [first, last) of a tensor with a multiple of `rows` in dimension 0; any other tensor as it is.
at::Tensor slice_rows(const at::Tensor& tensor, int64_t rows, int64_t first, int64_t last);
Flow slice_rows(const Flow& flow, int64_t rows, int64_t first, int64_t last);

// One value from its parts, in order. A part of an input that was handed on becomes that input again.
// Throws std::invalid_argument when an output does not have the rows of its part.
Flow join_rows(const Flow& inputs, int64_t rows, const std::vector<Flow>& input_parts,
               const std::vector<Flow>& output_parts);

}  // namespace roundpipe::runtime
