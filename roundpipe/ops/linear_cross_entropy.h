#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/arithmetic.h>

namespace roundpipe::ops {

// One elementwise operation between a model's output projection and its softmax.
struct LogitStep {
  enum class Kind : int { kMultiply, kDivide, kTanh, kFloat32 };
  Kind kind = Kind::kFloat32;
  double value = 1;  // for kMultiply and kDivide
};

// The steps of cap * tanh(logits / cap), with which Gemma 2 limits its logits.
std::vector<LogitStep> softcap_steps(double cap);

// Labels that do not count, unless another number is given.
inline constexpr int64_t kIgnoredLabel = -100;

struct LinearCrossEntropyOptions {
  // Tokens with this label add nothing to the loss or to the gradients.
  int64_t ignore_index = kIgnoredLabel;
  // The number of tokens whose logits exist at the same time. 0 = as many as fit chunk_logit_bytes, but at most 4096
  // and at least width / 4 (limited to 128..256). The chunks of one call have about equal lengths.
  int64_t chunk_tokens = 0;
  // The limit for one chunk's logits in fp32 if chunk_tokens is 0. 0 = as the kind of device has it, see
  // roundpipe::chunk_logit_bytes.
  int64_t chunk_logit_bytes = 0;
  // Applied in this order to the projection's logits, in the projection's dtype until a kFloat32. After the last step,
  // 16-bit logits are cast to fp32, so a final kFloat32 may be left out.
  std::vector<LogitStep> steps;
  // kFast: softmax, losses and gradient of a chunk are one kernel over its logits (kernels::cross_entropy_), in their
  // place; nothing is masked, so that hidden states of ignored tokens have to be finite, as in torch. Not for fp64.
  Arithmetic arithmetic = kDefaultArithmetic;
  // As in ProjectionUse, for kFast: a 16-bit weight's gradient that was summed over chunks in fp32 stays so.
  bool sums_products = false;
  // Whether to return the loss of each token, too.
  bool token_losses = false;
};

struct LinearCrossEntropyResult {
  at::Tensor sum;           // [], fp32 (fp64 for fp64 inputs): the sum of the losses of all tokens not ignored
  at::Tensor token_losses;  // [...], in sum's dtype, without a gradient; 0 if ignored. Undefined unless requested
};

// Computes the sum over tokens of -log softmax(steps(hidden weight^T + bias))[label] without ever holding the logits of
// all tokens. For each chunk of tokens, this call computes the loss and, if gradients are needed, the gradients of all
// inputs, because both need the same logits. The backward pass only scales these gradients.
//
// hidden [..., width], weight [vocabulary, width], bias [vocabulary], labels [...] (int64), all on one device. hidden,
// weight and bias share one of the dtypes fp64, fp32, bf16 and fp16; under autocast, they are cast like linear's
// inputs. Steps are rounded as autograd rounds them. The softmax is in fp32 (fp64 for fp64 inputs), and its gradient is
// rounded to the logits' dtype. In 16 bits, the matrix product rounds each chunk's part of the weight's gradient; the
// parts are summed in fp32, like the bias's gradient, and the sum is rounded once.
//
// Memory besides inputs and gradients: one chunk's logits in fp32 and, in 16 bits, also in that dtype, and one more
// buffer for each tanh; in 16 bits with several chunks, the weight's gradient in fp32 until the call returns;
// under autocast, the cast weight until the call returns. kFast without steps: the logits in the projection's dtype
// alone and, where a product cannot be added in fp32, half as much for it.
//
// On the CPU, labels are checked. On other devices, a check would make the host wait for the device, so a label out of
// range does whatever at::gather does with it. Nothing else here waits, either.
//
// Errors: std::invalid_argument for arguments that do not match. The backward pass throws it for create_graph, and if
// it runs again without retain_graph: the first run hands its gradients out instead of copying them.
// Thread safety: any thread; no state is kept between calls.
LinearCrossEntropyResult linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                              const std::optional<at::Tensor>& bias, const at::Tensor& labels,
                                              const LinearCrossEntropyOptions& options = {});

// Likewise the loss of each token, [...], 0 for those that are ignored, as cross_entropy without a reduction: each may
// have another gradient. The backward pass computes the logits once more, and holds as much memory as the call above;
// between the two, only the arguments are held. options.token_losses and options.sums_products have no effect.
at::Tensor linear_cross_entropy_of_tokens(const at::Tensor& hidden, const at::Tensor& weight,
                                          const std::optional<at::Tensor>& bias, const at::Tensor& labels,
                                          const LinearCrossEntropyOptions& options = {});

}  // namespace roundpipe::ops
