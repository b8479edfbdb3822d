#include <roundpipe/ops/encoded_product.h>

#include <utility>

#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <roundpipe/torch_compat/autocast.h>

namespace roundpipe::ops {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct EncodedWay : torch::CustomClassHolder {
  EncodedWay(ProductWay its_way, quantise::Encoding weight_encoding, c10::ScalarType product_dtype)
      : way(std::move(its_way)), encoding(weight_encoding), dtype(product_dtype) {}

  at::Tensor numbers(std::vector<at::Tensor> parts) const {
    return quantise::EncodedTensor(encoding, std::move(parts)).values().to(dtype);
  }

  const ProductWay way;
  const quantise::Encoding encoding;
  const c10::ScalarType dtype;  // of the product's operands
};

struct EncodedProduct : public torch::autograd::Function<EncodedProduct> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const std::optional<at::Tensor>& bias,
                            at::TensorList parts, const c10::intrusive_ptr<EncodedWay>& encoded) {
    const at::AutoDispatchBelowADInplaceOrView below;
    // These very tensors until the backward, although their handles may point elsewhere then.
    variable_list saved;
    for (const at::Tensor& part : parts) saved.push_back(part.detach());
    context->save_for_backward(saved);
    context->saved_data["encoded"] = c10::IValue::make_capsule(encoded);
    if (bias) context->saved_data["bias"] = bias->sizes().vec();
    return encoded->way.forward(input, encoded->numbers(parts.vec()), bias);
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const auto encoded = c10::static_intrusive_pointer_cast<EncodedWay>(context->saved_data["encoded"].toCapsule());
    variable_list parts = context->get_saved_variables();
    variable_list result(parts.size() + 3);
    const auto bias = context->saved_data.find("bias");
    if (bias != context->saved_data.end() && context->needs_input_grad(1))
      result[1] = at::sum_to(gradients[0], bias->second.toIntVector());
    if (context->needs_input_grad(0))
      result[0] = encoded->way.backward(gradients[0], encoded->numbers(std::move(parts)));
    return result;
  }
};

at::Tensor product_in(c10::ScalarType dtype, const at::Tensor& input, const Weight& weight, ProductWay way,
                      const std::optional<at::Tensor>& bias) {
  const auto encoded = c10::make_intrusive<EncodedWay>(std::move(way), weight.encoding(), dtype);
  const bool records = at::GradMode::is_enabled() && (input.requires_grad() || (bias && bias->requires_grad()));
  if (!records) return encoded->way.forward(input, encoded->numbers(weight.parts()), bias);
  return EncodedProduct::apply(input, bias, at::TensorList(weight.parts()), encoded);
}

}  // namespace

at::Tensor encoded_product(const at::Tensor& input, const Weight& weight, ProductWay way,
                           const std::optional<at::Tensor>& bias) {
  const c10::DeviceType device = input.device().type();
  if (!way.autocasts || !torch_compat::autocasts(device)) {
    return product_in(weight.scalar_type(), input, weight, std::move(way), bias);
  }
  const c10::ScalarType dtype = at::autocast::get_autocast_dtype(device);
  const auto cast = bias ? std::optional(bias->to(dtype)) : std::nullopt;
  const at::Tensor given = input.to(dtype);
  const c10::impl::ExcludeDispatchKeyGuard without(at::autocast::get_autocast_dispatch_key_from_device_type(device));
  return product_in(dtype, given, weight, std::move(way), cast);
}

}  // namespace roundpipe::ops
