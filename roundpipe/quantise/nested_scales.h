#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/quantise/part.h>

namespace roundpipe::quantise {

// Scales of 8 bits: a scale is map[code] * scale of its 256 + offset. Dettmers et al., "QLoRA", 2023, section 3 (double
// quantisation), with the map of "8-bit Optimizers via Block-wise Quantization", 2022 (dynamic tree quantisation).

// What holds so many scales: codes, scales of codes, the offset, and the map.
std::vector<Part> nested_parts(int64_t scales);
// Encodes fp32 scales [scales].
std::vector<at::Tensor> nest(const at::Tensor& scales);
// The scales, fp32. Throws std::invalid_argument for parts that do not fit each other.
at::Tensor flattened(const std::vector<at::Tensor>& parts);

// The map of dynamic tree quantisation: 256 numbers from -1 to 1, sorted.
at::Tensor dynamic_map();

}  // namespace roundpipe::quantise
