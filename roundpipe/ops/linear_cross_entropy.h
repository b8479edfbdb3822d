#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::ops {

// One elementwise operation between a model's output projection and its softmax.
struct LogitStep {
  enum class Kind : int { kMultiply, kDivide, kTanh, kFloat32 };
  Kind kind = Kind::kFloat32;
  double value = 1;  // of kMultiply and kDivide
};

// cap * tanh(logits / cap), as Gemma 2 limits its logits.
std::vector<LogitStep> softcap_steps(double cap);

struct LinearCrossEntropyOptions {
  // Tokens with this label add nothing to the loss and to the gradients.
  int64_t ignore_index = -100;
  // Tokens whose logits exist at the same time; 0 = as many as fit kChunkLogitBytes, but at most 4096, and at least
  // width / 4 within 128 to 256. The chunks of one call are of about equal length.
  int64_t chunk_tokens = 0;
  // Applied in this order to the logits as the projection leaves them, in its dtype until kFloat32. What is still in
  // 16 bits after the last step is cast to fp32 then, so that a last kFloat32 may be left out.
  std::vector<LogitStep> steps;
  // Also return the loss of each token.
  bool token_losses = false;
};

// Of one chunk's logits in fp32, when the chunk's length is left open.
constexpr int64_t kChunkLogitBytes = int64_t{64} << 20;

struct LinearCrossEntropyResult {
  at::Tensor sum;           // [], fp32 (fp64 of fp64 inputs): the sum of the losses of all tokens not ignored
  at::Tensor token_losses;  // [...], of sum's dtype and without a gradient; 0 where ignored. Undefined if not asked for
};

// The sum over tokens of -log softmax(steps(hidden weight^T + bias))[label], without ever holding the logits of all
// tokens: chunk by chunk of tokens, the loss and, where gradients will be asked for, the gradients of all inputs are
// computed in this call, since both need the same logits. The backward pass only scales these gradients.
//
// hidden [..., width], weight [vocabulary, width], bias [vocabulary], labels [...] (int64), all on one device.
// hidden, weight and bias have one of the dtypes fp64, fp32, bf16 and fp16 (under autocast they are cast as linear's
// inputs would be). Steps are rounded as autograd rounds them; the softmax is in fp32, its gradient is rounded to the
// logits' dtype. In 16 bits each chunk's part of the weight's gradient is rounded, as the matrix product leaves it; the
// parts are summed in fp32, like the bias's gradient, and the sum is rounded once.
//
// Memory beside inputs and gradients: one chunk's logits in fp32 and, in 16 bits, in that dtype too, and one more of
// that for each tanh; in 16 bits with several chunks, the weight's gradient in fp32 until the call returns; under
// autocast, the cast weight until then.
//
// On the CPU labels are checked; elsewhere a label out of range is what it is to at::gather, as checking would make
// the host wait for the device. Nothing else here waits either.
//
// Errors: std::invalid_argument for what does not fit together. The backward pass throws it when it is asked for a
// graph of its own (create_graph), or to run again: without retain_graph the gradients are given away, not copied.
// Thread safety: any thread; holds no state between calls.
LinearCrossEntropyResult linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias, const at::Tensor& labels,
                                              const LinearCrossEntropyOptions& options = {});

}  // namespace roundpipe::ops
