#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>

namespace roundpipe::kernels {

// Fused element-wise operators: each reads its inputs once or twice, computes in fp32 and rounds every result once. The
// order of each sum follows from shapes alone, so their bits are the same on any card and on the host.
//
// They are operators of torch's dispatcher, `torch.ops.roundpipe.NAME` in Python, with kernels for the host, for cards
// that have a launcher (launcher.h) and for shapes without values, and with gradients of first order (create_graph is
// an error). Other devices compute by torch's own operators, in that device's order of sums, and warn once. Tensors are
// bf16, fp16 or fp32, on one device, and may have any strides. Errors: std::invalid_argument for other dtypes or
// devices, or shapes that do not fit. Thread safety: any thread.

// The widest row of a norm: a card keeps the sums of its weight's gradient beside its cores.
inline constexpr int64_t kWidestNorm = 8192;

// Whether the operators take this dtype.
bool takes(c10::ScalarType dtype);

// input / sqrt(mean(input^2) + eps) * weight over the last dimension, in the input's dtype. weight [width]: of that
// dtype or fp32.
at::Tensor rms_norm(const at::Tensor& input, const at::Tensor& weight, double eps);

// The sum of two tensors of one shape, rounded, and its norm.
std::pair<at::Tensor, at::Tensor> add_rms_norm(const at::Tensor& input, const at::Tensor& residual,
                                               const at::Tensor& weight, double eps);

// Turns states [rows, tokens, heads, width] by tables of cosines and sines, [rows or 1, tokens, width or width / 2] in
// their dtype, which get no gradients. The halves of a head turn together, as transformers' rotate_half has it.
at::Tensor rotary(const at::Tensor& states, const at::Tensor& cos, const at::Tensor& sin);

// silu(gate) * up, for tensors of one shape. Without `up`, `gate` has both as the halves of its last dimension.
at::Tensor silu_gate(const at::Tensor& gate, const std::optional<at::Tensor>& up = std::nullopt);

// GPT-OSS's gate: (up + 1) * gate * sigmoid(alpha * gate), both bounded by `limit`, the gate from above only; gate and
// up alternate in the last dimension.
at::Tensor clamped_gate(const at::Tensor& gate_up, double alpha, double limit);

// The cross-entropy of each row of logits [tokens, vocabulary], fp32 [tokens], 0 where the label is `ignore_index` and
// NaN where it is none. With `writes_gradient`, the logits become the gradient of the losses' sum; an ignored row's is
// 0, unless it has no probabilities. Not differentiable: logits that require a gradient are an error.
at::Tensor cross_entropy_(at::Tensor& logits, const at::Tensor& labels, int64_t ignore_index, bool writes_gradient);

// sums += addends, for fp32 sums and addends of one of the dtypes; both contiguous. Not differentiable, likewise.
void add_wide_(at::Tensor& sums, const at::Tensor& addends);

// How numbers are encoded: "nf4", "mxfp4", "int4", "int8" or "fp8" of encodings.inl, with a scale for `block` numbers
// in row-major order: those of a row, or a power of two from 8.
struct EncodedNumbers {
  at::Tensor codes;   // uint8 [..., half of the last dimension] of 4 bits; int8, the shape of the numbers, of 8
  at::Tensor scales;  // [blocks]: fp32, uint8 for mxfp4
};
// Not differentiable: numbers that require a gradient are an error. The last dimension of numbers with 4-bit codes is
// even.
EncodedNumbers encode(const at::Tensor& numbers, std::string_view form, int64_t block);
// The numbers in `dtype`. Gradients do not pass.
at::Tensor decode(const EncodedNumbers& encoded, std::string_view form, int64_t block, c10::ScalarType dtype);

// The kernels' source for compilers of cards at run time, for ROUNDPIPE_ON_CARD. It includes nothing. Its entries have
// names such as "rms_norm_bf16" and take the struct of that kernel.
std::string_view card_source();

}  // namespace roundpipe::kernels
