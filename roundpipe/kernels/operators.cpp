// The operators' schemas, and their gradients.
#include <stdexcept>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <roundpipe/core/error.h>
#include <roundpipe/kernels/card/card_launcher.h>
#include <roundpipe/kernels/kernel_calls.h>
#include <roundpipe/kernels/kernels.h>
#include <roundpipe/kernels/launcher.h>

namespace roundpipe::kernels {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using MaybeTensor = std::optional<Tensor>;

namespace {

template <typename Signature>
auto operator_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

std::tuple<Tensor, Tensor, Tensor> norm(const Tensor& input, const MaybeTensor& residual, const Tensor& weight,
                                        double eps) {
  static const auto op =
      operator_of<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const MaybeTensor&, const Tensor&, double)>(
          "roundpipe::_rms_norm");
  return op.call(input, residual, weight, eps);
}

std::tuple<Tensor, Tensor> norm_backward(const Tensor& normed, const MaybeTensor& sum, const Tensor& input,
                                         const Tensor& weight, const Tensor& scales, bool weight_trains) {
  static const auto op =
      operator_of<std::tuple<Tensor, Tensor>(const Tensor&, const MaybeTensor&, const Tensor&, const Tensor&,
                                             const Tensor&, bool)>("roundpipe::_rms_norm_backward");
  return op.call(normed, sum, input, weight, scales, weight_trains);
}

Tensor turn(const Tensor& states, const Tensor& cos, const Tensor& sin, bool backward) {
  static const auto op = operator_of<Tensor(const Tensor&, const Tensor&, const Tensor&, bool)>("roundpipe::_rotary");
  return op.call(states, cos, sin, backward);
}

Tensor gate(const Tensor& first, const MaybeTensor& up, std::optional<double> alpha, double limit) {
  static const auto op =
      operator_of<Tensor(const Tensor&, const MaybeTensor&, std::optional<double>, double)>("roundpipe::_gate");
  return op.call(first, up, alpha, limit);
}

std::tuple<Tensor, Tensor> gate_backward(const Tensor& gradient, const Tensor& first, const MaybeTensor& up,
                                         std::optional<double> alpha, double limit) {
  static const auto op = operator_of<std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, const MaybeTensor&, std::optional<double>, double)>("roundpipe::_gate_backward");
  return op.call(gradient, first, up, alpha, limit);
}

// None of the operators has gradients of gradients.
void refuse_second_order(const char* where) {
  if (!at::GradMode::is_enabled()) return;
  throw std::invalid_argument(
      concat("[", where,
             "] the backward pass was asked for a graph of its own, which it has none of; leave "
             "create_graph out, or use torch's own operators for second derivatives"));
}

MaybeTensor if_defined(const Tensor& tensor) { return tensor.defined() ? MaybeTensor(tensor) : std::nullopt; }

struct NormFunction : public torch::autograd::Function<NormFunction> {
  static variable_list forward(AutogradContext* context, const Tensor& input, const MaybeTensor& residual,
                               const Tensor& weight, double eps) {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto [sum, normed, scales] = norm(input, residual, weight, eps);
    context->save_for_backward({residual ? sum : input, weight, scales});
    context->saved_data["added"] = residual.has_value();
    context->set_materialize_grads(false);
    if (!residual) return {normed};
    return {sum, normed};
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    refuse_second_order("rms_norm");
    const variable_list saved = context->get_saved_variables();
    const bool added = context->saved_data["added"].toBool();
    const Tensor of_sum = added ? gradients[0] : Tensor(), of_normed = gradients[added ? 1 : 0];
    if (!of_normed.defined()) return {of_sum, added ? of_sum : Tensor(), Tensor(), Tensor()};
    const bool weight_trains = saved[1].requires_grad();
    auto [input, weight] = norm_backward(of_normed, if_defined(of_sum), saved[0], saved[1], saved[2], weight_trains);
    return {input, added ? input : Tensor(), weight_trains ? weight : Tensor(), Tensor()};
  }
};

struct RotaryFunction : public torch::autograd::Function<RotaryFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& states, const Tensor& cos, const Tensor& sin) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({cos, sin});
    return turn(states, cos, sin, false);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    refuse_second_order("rotary");
    const variable_list saved = context->get_saved_variables();
    return {turn(gradients[0], saved[0], saved[1], true), Tensor(), Tensor()};
  }
};

struct GateFunction : public torch::autograd::Function<GateFunction> {
  static Tensor forward(AutogradContext* context, const Tensor& first, const MaybeTensor& up,
                        std::optional<double> alpha, double limit) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({first, up.value_or(Tensor())});
    if (alpha) context->saved_data["alpha"] = *alpha;
    context->saved_data["limit"] = limit;
    return gate(first, up, alpha, limit);
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    refuse_second_order("gate");
    const variable_list saved = context->get_saved_variables();
    const auto found = context->saved_data.find("alpha");
    const std::optional<double> alpha =
        found == context->saved_data.end() ? std::nullopt : std::optional<double>(found->second.toDouble());
    auto [first, up] =
        gate_backward(gradients[0], saved[0], if_defined(saved[1]), alpha, context->saved_data["limit"].toDouble());
    return {first, saved[1].defined() ? up : Tensor(), Tensor(), Tensor()};
  }
};

Tensor differentiable_norm(const Tensor& input, const Tensor& weight, double eps) {
  return NormFunction::apply(input, std::nullopt, weight, eps)[0];
}

std::tuple<Tensor, Tensor> differentiable_add_norm(const Tensor& input, const Tensor& residual, const Tensor& weight,
                                                   double eps) {
  const variable_list found = NormFunction::apply(input, residual, weight, eps);
  return {found[0], found[1]};
}

Tensor differentiable_rotary(const Tensor& states, const Tensor& cos, const Tensor& sin) {
  return RotaryFunction::apply(states, cos, sin);
}

Tensor differentiable_silu_gate(const Tensor& gate, const MaybeTensor& up) {
  return GateFunction::apply(gate, up, std::nullopt, 0.0);
}

Tensor differentiable_clamped_gate(const Tensor& gate_up, double alpha, double limit) {
  return GateFunction::apply(gate_up, std::nullopt, alpha, limit);
}

// For operators without gradients, which autograd would pass over in silence.
void refuse_gradients(const char* where, const Tensor& tensor) {
  if (!at::GradMode::is_enabled() || !tensor.requires_grad()) return;
  throw std::invalid_argument(
      concat("[", where,
             "] the operator has no gradient, and was given a tensor that requires one; expected "
             "a detached one, or torch.no_grad()"));
}

Tensor undifferentiable_cross_entropy(Tensor& logits, const Tensor& labels, int64_t ignore_index,
                                      bool writes_gradient) {
  refuse_gradients("cross_entropy_", logits);
  const at::AutoDispatchBelowADInplaceOrView below;
  return cross_entropy_(logits, labels, ignore_index, writes_gradient);
}

Tensor& undifferentiable_add_wide(Tensor& sums, const Tensor& addends) {
  refuse_gradients("add_wide_", sums);
  refuse_gradients("add_wide_", addends);
  const at::AutoDispatchBelowADInplaceOrView below;
  add_wide_(sums, addends);
  return sums;
}

std::tuple<Tensor, Tensor> undifferentiable_encode(const Tensor& numbers, std::string_view form, int64_t block) {
  refuse_gradients("encode", numbers);
  const at::AutoDispatchBelowADInplaceOrView below;
  auto [codes, scales] = encode(numbers, form, block);
  return {std::move(codes), std::move(scales)};
}

Tensor undifferentiable_decode(const Tensor& codes, const Tensor& scales, std::string_view form, int64_t block,
                               at::ScalarType dtype) {
  refuse_gradients("decode", scales);
  const at::AutoDispatchBelowADInplaceOrView below;
  return decode({codes, scales}, form, block, dtype);
}

}  // namespace

TORCH_LIBRARY(roundpipe, library) {
  library.def("rms_norm(Tensor input, Tensor weight, float eps) -> Tensor", differentiable_norm);
  library.def("add_rms_norm(Tensor input, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)",
              differentiable_add_norm);
  library.def("rotary(Tensor states, Tensor cos, Tensor sin) -> Tensor", differentiable_rotary);
  library.def("silu_gate(Tensor gate, Tensor? up=None) -> Tensor", differentiable_silu_gate);
  library.def("clamped_gate(Tensor gate_up, float alpha, float limit) -> Tensor", differentiable_clamped_gate);
  library.def("cross_entropy_(Tensor(a!) logits, Tensor labels, int ignore_index, bool writes_gradient) -> Tensor");
  library.def("add_wide_(Tensor(a!) sums, Tensor addends) -> Tensor(a!)");
  library.def("encode(Tensor numbers, str form, int block) -> (Tensor, Tensor)");
  library.def("decode(Tensor codes, Tensor scales, str form, int block, ScalarType dtype) -> Tensor");
  library.def("_rms_norm(Tensor input, Tensor? residual, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)");
  library.def(
      "_rms_norm_backward(Tensor normed_gradient, Tensor? sum_gradient, Tensor input, Tensor weight, Tensor scales, "
      "bool weight_trains) -> (Tensor, Tensor)");
  library.def("_rotary(Tensor states, Tensor cos, Tensor sin, bool backward) -> Tensor");
  library.def("_gate(Tensor first, Tensor? up, float? alpha, float limit) -> Tensor");
  library.def(
      "_gate_backward(Tensor gradient, Tensor first, Tensor? up, float? alpha, float limit) -> (Tensor, Tensor)");
}

TORCH_LIBRARY_IMPL(roundpipe, Autograd, library) {
  library.impl("cross_entropy_", undifferentiable_cross_entropy);
  library.impl("add_wide_", undifferentiable_add_wide);
  library.impl("encode", undifferentiable_encode);
  library.impl("decode", undifferentiable_decode);
}
TORCH_LIBRARY_IMPL(roundpipe, CPU, library) { add_kernel_calls(library); }
TORCH_LIBRARY_IMPL(roundpipe, Meta, library) { add_kernel_calls(library); }
// Every other kind of device.
TORCH_LIBRARY_IMPL(roundpipe, CompositeExplicitAutograd, library) {
  add_kernel_calls(library);
  register_launcher(c10::DeviceType::CUDA, card::card_launcher());
}

bool takes(c10::ScalarType dtype) { return dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kFloat; }

Tensor rms_norm(const Tensor& input, const Tensor& weight, double eps) {
  static const auto op = operator_of<Tensor(const Tensor&, const Tensor&, double)>("roundpipe::rms_norm");
  return op.call(input, weight, eps);
}

std::pair<Tensor, Tensor> add_rms_norm(const Tensor& input, const Tensor& residual, const Tensor& weight, double eps) {
  static const auto op = operator_of<std::tuple<Tensor, Tensor>(const Tensor&, const Tensor&, const Tensor&, double)>(
      "roundpipe::add_rms_norm");
  auto [sum, normed] = op.call(input, residual, weight, eps);
  return {std::move(sum), std::move(normed)};
}

Tensor rotary(const Tensor& states, const Tensor& cos, const Tensor& sin) {
  static const auto op = operator_of<Tensor(const Tensor&, const Tensor&, const Tensor&)>("roundpipe::rotary");
  return op.call(states, cos, sin);
}

Tensor silu_gate(const Tensor& gate, const MaybeTensor& up) {
  static const auto op = operator_of<Tensor(const Tensor&, const MaybeTensor&)>("roundpipe::silu_gate");
  return op.call(gate, up);
}

Tensor clamped_gate(const Tensor& gate_up, double alpha, double limit) {
  static const auto op = operator_of<Tensor(const Tensor&, double, double)>("roundpipe::clamped_gate");
  return op.call(gate_up, alpha, limit);
}

Tensor cross_entropy_(Tensor& logits, const Tensor& labels, int64_t ignore_index, bool writes_gradient) {
  static const auto op = operator_of<Tensor(Tensor&, const Tensor&, int64_t, bool)>("roundpipe::cross_entropy_");
  return op.call(logits, labels, ignore_index, writes_gradient);
}

void add_wide_(Tensor& sums, const Tensor& addends) {
  static const auto op = operator_of<Tensor&(Tensor&, const Tensor&)>("roundpipe::add_wide_");
  op.call(sums, addends);
}

EncodedNumbers encode(const Tensor& numbers, std::string_view form, int64_t block) {
  static const auto op =
      operator_of<std::tuple<Tensor, Tensor>(const Tensor&, std::string_view, int64_t)>("roundpipe::encode");
  auto [codes, scales] = op.call(numbers, form, block);
  return {std::move(codes), std::move(scales)};
}

Tensor decode(const EncodedNumbers& encoded, std::string_view form, int64_t block, at::ScalarType dtype) {
  static const auto op =
      operator_of<Tensor(const Tensor&, const Tensor&, std::string_view, int64_t, at::ScalarType)>("roundpipe::decode");
  return op.call(encoded.codes, encoded.scales, form, block, dtype);
}

}  // namespace roundpipe::kernels
