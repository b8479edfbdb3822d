#include <roundpipe/models/moe.h>

#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/csrc/autograd/custom_function.h>

#include <roundpipe/core/error.h>
#include <roundpipe/kernels/kernels.h>
#include <roundpipe/ops/encoded_product.h>
#include <roundpipe/ops/grouped_product.h>

namespace roundpipe::models {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

namespace {

// What the router chose.
struct Routing {
  Tensor weights;  // [tokens, top_k]
  Tensor experts;  // [tokens, top_k]
};

Routing route(const MoeConfig& config, const MoeWeights& weights, const Tensor& tokens, Tensor* router_logits) {
  const Tensor logits = at::linear(tokens, weights.router.weight.values(), weights.router.bias);
  if (router_logits != nullptr) *router_logits = logits;
  if (config.shares == Shares::kSoftmaxOfChosen) {
    const auto [values, indices] = at::topk(logits, config.top_k, -1);
    return {at::softmax(values, 1, values.scalar_type()), indices};
  }
  const Tensor probabilities = at::softmax(logits, -1, at::kFloat);
  auto [values, indices] = at::topk(probabilities, config.top_k, -1);
  if (config.shares == Shares::kNormalized) values.div_(values.sum(-1, /*keepdim=*/true));
  return {values.to(logits.scalar_type()), indices};
}

Tensor gated(const MoeConfig& config, Arithmetic arithmetic, const Tensor& gate_up) {
  if (!config.clamped) return ops::activated_product(gate_up, std::nullopt, config.activation, arithmetic);
  const auto [alpha, limit] = *config.clamped;
  if (arithmetic == Arithmetic::kFast && kernels::takes(gate_up.scalar_type())) {
    return kernels::clamped_gate(gate_up, alpha, limit);
  }
  Tensor gate = gate_up.slice(-1, 0, std::nullopt, 2);
  Tensor up = gate_up.slice(-1, 1, std::nullopt, 2);
  gate = gate.clamp(std::nullopt, limit);
  up = up.clamp(-limit, limit);
  const Tensor glu = gate * at::sigmoid(gate * alpha);
  return (up + 1) * glu;
}

// The matrices of some experts. Its gradient has the bits of a sum of one zero-filled gradient for each of them, which
// is what autograd makes of a selection for each expert, but exists once.
struct MatricesOf : public torch::autograd::Function<MatricesOf> {
  static variable_list forward(AutogradContext* context, const Tensor& stacked, const std::vector<int64_t>& experts) {
    context->saved_data["experts"] = experts;
    context->saved_data["sizes"] = stacked.sizes().vec();
    variable_list matrices;
    matrices.reserve(experts.size());
    for (const int64_t expert : experts) matrices.push_back(stacked.select(0, expert));
    return matrices;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::vector<int64_t> experts = context->saved_data["experts"].toIntVector();
    Tensor sum;
    for (size_t i = 0; i < experts.size(); ++i) {
      if (!gradients[i].defined()) continue;
      if (!sum.defined()) sum = at::zeros(context->saved_data["sizes"].toIntVector(), gradients[i].options());
      Tensor place = sum.select(0, experts[i]);
      // A sum with zeros has no negative ones.
      experts.size() == 1 ? place.copy_(gradients[i]) : place.add_(gradients[i]);
    }
    return {sum, {}};
  }
};

// The rows of `tokens` that each expert takes: `rows`, cut into parts of these sizes. Its gradient has the bits of a
// sum of one zero-filled gradient for each part, the last part's first, which is how autograd adds them.
struct RowsOf : public torch::autograd::Function<RowsOf> {
  static variable_list forward(AutogradContext* context, const Tensor& tokens, const Tensor& rows,
                               const std::vector<int64_t>& sizes) {
    context->save_for_backward({rows});
    context->saved_data["sizes"] = sizes;
    context->saved_data["count"] = tokens.size(0);
    variable_list taken;
    taken.reserve(sizes.size());
    for (const Tensor& row : rows.split_with_sizes(sizes)) taken.push_back(tokens.index({row}));
    return taken;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const std::vector<Tensor> rows =
        context->get_saved_variables()[0].split_with_sizes(context->saved_data["sizes"].toIntVector());
    Tensor sum;
    for (size_t i = gradients.size(); i-- > 0;) {
      const Tensor& gradient = gradients[i];
      if (!gradient.defined()) continue;
      if (!sum.defined()) sum = at::zeros({context->saved_data["count"].toInt(), gradient.size(1)}, gradient.options());
      sum.index_add_(0, rows[i], gradient);
    }
    return {sum, {}, {}};
  }
};

Tensor by_expert(const MoeConfig& config, const MoeWeights& weights, const Tensor& tokens, const Routing& routing,
                 Arithmetic arithmetic) {
  const int64_t count = tokens.size(0), experts = weights.gate_up.size(0);
  // Each expert takes the tokens that chose it first, then those that chose it second, and so on.
  const Tensor chosen = routing.experts.t().reshape(-1);
  const auto [sorted, order] = at::sort(chosen, /*stable=*/true, /*dim=*/-1, /*descending=*/false);
  const Tensor rows = order.remainder(count);
  const Tensor ranks = order.floor_divide(count);
  const Tensor bounds = at::searchsorted(sorted, at::arange(experts + 1, sorted.options())).cpu();
  const auto bound = bounds.accessor<int64_t, 1>();
  std::vector<int64_t> hit, sizes;
  for (int64_t expert = 0; expert < experts; ++expert) {
    const int64_t size = bound[expert + 1] - bound[expert];
    if (size == 0) continue;
    hit.push_back(expert);
    sizes.push_back(size);
  }
  const variable_list own = RowsOf::apply(tokens, rows, sizes);
  const std::vector<Tensor> row = rows.split_with_sizes(sizes);
  const std::vector<Tensor> share = routing.weights.index({rows, ranks}).unsqueeze(-1).split_with_sizes(sizes);
  const auto of_hit = [&](const Tensor& stacked) {
    return stacked.defined() ? MatricesOf::apply(stacked, hit) : variable_list(hit.size());
  };
  const auto matrices_of_hit = [&](const ops::Weight& stacked) -> std::vector<ops::Weight> {
    if (stacked.is_encoded()) return stacked.select(hit);
    const variable_list plain = of_hit(stacked.values());
    return {plain.begin(), plain.end()};
  };
  const std::vector<ops::Weight> gate_up = matrices_of_hit(weights.gate_up), down = matrices_of_hit(weights.down);
  const variable_list gate_up_bias = of_hit(weights.gate_up_bias), down_bias = of_hit(weights.down_bias);
  const auto product = [&](const Tensor& states, const ops::Weight& matrix, const Tensor& bias) {
    if (!config.clamped) return ops::project(states, {matrix, bias.defined() ? std::optional(bias) : std::nullopt});
    const Tensor result = ops::times(states, matrix);
    return bias.defined() ? result + bias : result;
  };
  Tensor result = at::zeros_like(tokens);
  for (size_t i = 0; i < hit.size(); ++i) {
    Tensor states = gated(config, arithmetic, product(own[i], gate_up[i], gate_up_bias[i]));
    states = product(states, down[i], down_bias[i]);
    states = states * share[i];
    result.index_add_(0, row[i], states.to(result.scalar_type()));
  }
  return result;
}

// Each token's outputs, weighted, in the order of the router's choice: [tokens * top_k, width].
Tensor summed(const MoeConfig& config, const Tensor& tokens, const Tensor& weighted) {
  const Tensor sum = weighted.view({tokens.size(0), config.top_k, tokens.size(1)}).sum(1);
  return sum.to(tokens.scalar_type());
}

Tensor grouped(const MoeConfig& config, const MoeWeights& weights, const Tensor& tokens, const Routing& routing,
               Arithmetic arithmetic) {
  const int64_t experts = weights.gate_up.size(0);
  const auto [sorted, order] = at::sort(routing.experts.reshape(-1));
  const Tensor own = tokens.index({order.floor_divide(config.top_k)});
  const Tensor shares = routing.weights.reshape(-1).index({order});
  // histc takes no integers on the host.
  const Tensor counted = sorted.to(sorted.is_cpu() || sorted.is_mps() ? at::kFloat : at::kInt);
  const Tensor ends = at::cumsum(at::histc(counted, experts, 0, experts - 1), 0, at::kInt);
  const auto product = [&](const Tensor& states, const ops::Weight& stacked, const Tensor& bias) {
    const Tensor biases = bias.defined() ? bias.index({sorted}) : bias;
    const ops::Stacked way = config.clamped ? ops::Stacked::kInputsFirst : ops::Stacked::kOutputsFirst;
    Tensor result = ops::grouped_product(states.to(stacked.scalar_type()), stacked, ends, way);
    return biases.defined() ? result.add_(biases) : result;
  };
  Tensor states = gated(config, arithmetic, product(own, weights.gate_up, weights.gate_up_bias));
  states = product(states, weights.down, weights.down_bias);
  const Tensor weighted = states * shares.unsqueeze(-1);
  Tensor back = at::empty_like(order);
  back.index_put_({order}, at::arange(order.size(0), order.options()));
  return summed(config, tokens, weighted.index({back}));
}

// Each row of `states` by the matrix of its expert.
Tensor batched_product(const Tensor& states, const ops::Weight& stacked, const Tensor& chosen, bool inputs_first) {
  const auto times = [=](const Tensor& given, const Tensor& matrices, bool first) {
    return first ? at::bmm(given.unsqueeze(1), matrices).squeeze(1)
                 : at::bmm(matrices, given.unsqueeze(-1)).squeeze(-1);
  };
  if (!stacked.is_encoded()) return times(states, stacked.parts()[0].index({chosen}), inputs_first);
  ops::ProductWay way;
  way.forward = [=](const Tensor& given, const Tensor& numbers, const auto&) {
    return times(given, numbers.index({chosen}), inputs_first);
  };
  way.backward = [=](const Tensor& gradient, const Tensor& numbers) {
    return times(gradient, numbers.index({chosen}).transpose(1, 2), inputs_first);
  };
  return ops::encoded_product(states, stacked, std::move(way));
}

Tensor batched(const MoeConfig& config, const MoeWeights& weights, const Tensor& tokens, const Routing& routing,
               Arithmetic arithmetic) {
  const Tensor own = tokens.repeat_interleave(config.top_k, 0);
  const Tensor chosen = routing.experts.reshape(-1);
  const Tensor shares = routing.weights.reshape(-1);
  const auto product = [&](const Tensor& states, const ops::Weight& stacked, const Tensor& bias) {
    const Tensor biases = bias.defined() ? bias.index({chosen}) : bias;
    Tensor result = batched_product(states, stacked, chosen, config.clamped.has_value());
    return biases.defined() ? result.add_(biases) : result;
  };
  Tensor states = gated(config, arithmetic, product(own, weights.gate_up, weights.gate_up_bias));
  states = product(states, weights.down, weights.down_bias);
  return summed(config, tokens, states * shares.unsqueeze(-1));
}

}  // namespace

Shares parse_shares(std::string_view name) {
  if (name == "softmax_of_all") return Shares::kSoftmaxOfAll;
  if (name == "normalized") return Shares::kNormalized;
  if (name == "softmax_of_chosen") return Shares::kSoftmaxOfChosen;
  throw std::invalid_argument(
      concat("[moe] the shares are '", name, "', expected one of softmax_of_all, normalized and softmax_of_chosen"));
}

Tensor mixture_of_experts(const MoeConfig& config, const MoeWeights& weights, Experts experts, const Tensor& hidden,
                          Tensor* router_logits, Arithmetic arithmetic) {
  const Tensor tokens = hidden.reshape({-1, hidden.size(-1)});
  const Routing routing = route(config, weights, tokens, router_logits);
  Tensor result;
  switch (experts) {
    case Experts::kEager:
      result = by_expert(config, weights, tokens, routing, arithmetic);
      break;
    case Experts::kGrouped:
      result = grouped(config, weights, tokens, routing, arithmetic);
      break;
    case Experts::kBatched:
      result = batched(config, weights, tokens, routing, arithmetic);
      break;
  }
  return result.reshape(hidden.sizes());
}

}  // namespace roundpipe::models
