#include <roundpipe/language/router_loss.h>

#include <tuple>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

namespace roundpipe::language {

using at::Tensor;

namespace {

Tensor flat(const Tensor& attention_mask) { return attention_mask.reshape(-1).to(at::kFloat); }

}  // namespace

RouterSums no_routers(const ExpertsConfig& experts, c10::Device device) {
  const Tensor none = at::zeros({experts.count}, at::TensorOptions(at::kFloat).device(device));
  return {none, none};
}

RouterSums with_router(const RouterSums& sums, const ExpertsConfig& experts, const Tensor& logits,
                       const Tensor& attention_mask) {
  const Tensor probabilities = at::softmax(logits, -1);
  const Tensor chosen = std::get<1>(at::topk(probabilities, experts.top_k, -1)).reshape(-1);
  if (attention_mask.defined()) {
    const Tensor counts = flat(attention_mask);
    const Tensor each = at::zeros({experts.count}, counts.options());
    return {sums.chosen + at::scatter_add(each, 0, chosen, counts.repeat_interleave(experts.top_k)),
            sums.probabilities + (probabilities.to(at::kFloat) * counts.unsqueeze(-1)).sum(0)};
  }
  // histc takes no integers on the host.
  const Tensor counted = chosen.to(chosen.is_cpu() || chosen.is_mps() ? at::kFloat : at::kInt);
  return {sums.chosen + at::histc(counted, experts.count, 0, experts.count),
          sums.probabilities + probabilities.to(at::kFloat).sum(0)};
}

Tensor router_loss(const RouterSums& sums, int64_t layers, int64_t tokens, const Tensor& attention_mask) {
  Tensor chosen, probabilities;
  if (attention_mask.defined()) {
    const Tensor once = flat(attention_mask).sum();
    Tensor all = once;
    for (int64_t layer = 1; layer < layers; ++layer) all = all + once;
    chosen = sums.chosen / all;
    probabilities = sums.probabilities / all;
  } else {
    const auto all = static_cast<double>(layers * tokens);
    chosen = sums.chosen / all;
    probabilities = sums.probabilities / all;
  }
  return at::sum(chosen * probabilities.unsqueeze(0)) * sums.chosen.size(0);
}

}  // namespace roundpipe::language
