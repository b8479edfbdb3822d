// Cells of recurrent layers, which torch asks of every device but the CPU. Made of other operators.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <torch/library.h>

#include "kernels.h"

namespace fake_card {
namespace {

using Optional = std::optional<at::Tensor>;

at::Tensor with_bias(const at::Tensor& gates, const Optional& bias) {
  return bias && bias->defined() ? gates + *bias : gates;
}

at::Tensor of_bias(const at::Tensor& gradient, bool has_bias) { return has_bias ? gradient.sum(0) : at::Tensor(); }

std::tuple<at::Tensor, at::Tensor> gru_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                            const at::Tensor& hidden, const Optional& input_bias,
                                            const Optional& hidden_bias) {
  const auto from_input = with_bias(input_gates, input_bias).chunk(3, 1);
  const auto from_hidden = with_bias(hidden_gates, hidden_bias).chunk(3, 1);
  const at::Tensor reset = (from_input[0] + from_hidden[0]).sigmoid();
  const at::Tensor update = (from_input[1] + from_hidden[1]).sigmoid();
  const at::Tensor candidate = (from_input[2] + reset * from_hidden[2]).tanh();
  return {candidate + update * (hidden - candidate), at::cat({reset, update, candidate, hidden, from_hidden[2]}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor> gru_cell_backward(const at::Tensor& gradient,
                                                                                         const at::Tensor& workspace,
                                                                                         bool has_bias) {
  const auto saved = workspace.chunk(5, 1);
  const at::Tensor &reset = saved[0], &update = saved[1], &candidate = saved[2], &hidden = saved[3];
  const at::Tensor of_candidate = gradient * (1 - update) * (1 - candidate * candidate);
  const at::Tensor of_update = gradient * (hidden - candidate) * (1 - update) * update;
  const at::Tensor of_reset = of_candidate * saved[4] * (1 - reset) * reset;
  const at::Tensor of_input_gates = at::cat({of_reset, of_update, of_candidate}, 1);
  const at::Tensor of_hidden_gates = at::cat({of_reset, of_update, of_candidate * reset}, 1);
  return {of_input_gates, of_hidden_gates, gradient * update, of_bias(of_input_gates, has_bias),
          of_bias(of_hidden_gates, has_bias)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input_gates, const at::Tensor& hidden_gates,
                                                         const at::Tensor& cell, const Optional& input_bias,
                                                         const Optional& hidden_bias) {
  const auto gates = (with_bias(input_gates, input_bias) + with_bias(hidden_gates, hidden_bias)).chunk(4, 1);
  const at::Tensor input = gates[0].sigmoid(), forget = gates[1].sigmoid(), output = gates[3].sigmoid();
  const at::Tensor candidate = gates[2].tanh();
  const at::Tensor next = forget * cell + input * candidate;
  return {output * next.tanh(), next, at::cat({input, forget, candidate, output}, 1)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> lstm_cell_backward(const Optional& of_hidden, const Optional& of_next,
                                                                  const at::Tensor& cell, const at::Tensor& next,
                                                                  const at::Tensor& workspace, bool has_bias) {
  const auto saved = workspace.chunk(4, 1);
  const at::Tensor &input = saved[0], &forget = saved[1], &candidate = saved[2], &output = saved[3];
  const at::Tensor shown = next.tanh();
  const bool has_hidden = of_hidden && of_hidden->defined();
  const at::Tensor hidden = has_hidden ? *of_hidden : at::zeros_like(next);
  at::Tensor total = hidden * output * (1 - shown * shown);
  if (of_next && of_next->defined()) total = total + *of_next;
  const at::Tensor of_gates =
      at::cat({total * candidate * input * (1 - input), total * cell * forget * (1 - forget),
               total * input * (1 - candidate * candidate), hidden * shown * output * (1 - output)},
              1);
  return {of_gates, total * forget, of_bias(of_gates, has_bias)};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_thnn_fused_gru_cell", gru_cell);
  library.impl("_thnn_fused_gru_cell_backward", gru_cell_backward);
  library.impl("_thnn_fused_lstm_cell", lstm_cell);
  library.impl("_thnn_fused_lstm_cell_backward_impl", lstm_cell_backward);
}

}  // namespace
}  // namespace fake_card
