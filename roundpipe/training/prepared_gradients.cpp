#include <roundpipe/training/prepared_gradients.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_amp_foreach_non_finite_check_and_unscale.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/utils/clip_grad.h>

namespace roundpipe {

PreparedGradients prepare_gradients(const std::vector<at::Tensor>& parameters, const at::Tensor& loss_scale,
                                    const std::optional<double>& max_norm) {
  std::vector<at::Tensor> used, gradients;
  for (const at::Tensor& parameter : parameters) {
    if (!parameter.grad().defined()) continue;
    used.push_back(parameter);
    gradients.push_back(parameter.grad());
  }
  PreparedGradients prepared;
  if (loss_scale.defined()) {
    const at::NoGradGuard no_grad;
    at::Tensor found = at::zeros({1}, at::kFloat);
    const at::Tensor inverse = at::full({1}, 1.0 / loss_scale.item<double>(), at::kFloat);
    if (!gradients.empty()) at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse);
    prepared.overflowed = found.item<float>() != 0;
  }
  if (max_norm && !prepared.overflowed) prepared.norm = torch::nn::utils::clip_grad_norm_(used, *max_norm);
  return prepared;
}

}  // namespace roundpipe
