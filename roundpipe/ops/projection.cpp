#include <roundpipe/ops/projection.h>

#include <ATen/ExpandUtils.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/custom_function.h>

#include <roundpipe/ops/encoded_product.h>
#include <roundpipe/torch_compat/autocast.h>
#include <roundpipe/torch_compat/autograd_nodes.h>

namespace roundpipe::ops {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The gradient of the left matrix of a product with weight^T, as autograd computes it.
at::Tensor left_gradient(const at::Tensor& gradient, const at::Tensor& weight, at::IntArrayRef sizes,
                         at::IntArrayRef strides) {
  if (strides[0] == 1 && strides[1] == sizes[0]) return weight.t().mm(gradient.t()).t();
  return gradient.mm(weight);
}

// Whether the weight's gradient has been added elsewhere, as the product of these matrices.
bool is_summed(AutogradContext* context, const at::Tensor& left, const at::Tensor& right) {
  const auto found = context->saved_data.find("consumer");
  if (found == context->saved_data.end() || at::GradMode::is_enabled()) return false;
  return c10::static_intrusive_pointer_cast<torch_compat::GradientConsumer>(found->second.toCapsule())
      ->add_product(left, right);
}

// at::linear whose values nobody may read, and whose weight's gradient may be summed as a product. Its products are
// those of at::linear, in its order.
struct Linear : public torch::autograd::Function<Linear> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor& weight,
                            const std::optional<at::Tensor>& bias, bool is_read,
                            const c10::intrusive_ptr<torch_compat::GradientConsumer>& consumer) {
    const at::AutoDispatchBelowADInplaceOrView below;
    context->save_for_backward({input, weight});
    context->saved_data["has_bias"] = bias.has_value();
    if (consumer) context->saved_data["consumer"] = c10::IValue::make_capsule(consumer);
    return is_read ? at::linear(input, weight, bias) : without_values(input, weight.size(0));
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1];
    const at::Tensor rows = input.reshape({-1, input.size(-1)});
    const at::Tensor gradient = gradients[0].reshape({-1, weight.size(0)});
    variable_list result(5);
    if (context->needs_input_grad(0))
      result[0] = left_gradient(gradient, weight, rows.sizes(), rows.strides()).view(input.sizes());
    if (context->needs_input_grad(1) && !is_summed(context, gradient.t(), rows)) result[1] = gradient.t().mm(rows);
    const bool has_bias = context->saved_data["has_bias"].toBool();
    if (has_bias && context->needs_input_grad(2)) result[2] = at::sum_to(gradient, weight.sizes().slice(0, 1));
    return result;
  }
};

// Without autograd there is no graph to make; autocast casts what a product saves; the rest is how MLPs call it.
bool may_have_own_node(const at::Tensor& input, const at::Tensor& weight) {
  return at::GradMode::is_enabled() && (input.requires_grad() || weight.requires_grad()) && input.dim() >= 2 &&
         input.is_contiguous() && weight.is_contiguous() && !torch_compat::autocasts(input.device().type());
}

// Whether at::matmul multiplies all rows at once: it does where they are a matrix without a copy.
bool is_folded(const at::Tensor& input) {
  if (input.numel() == 0) return true;
  for (int64_t d = 0; d + 2 < input.dim(); ++d) {
    if (input.stride(d) != input.stride(d + 1) * input.size(d + 1)) return false;
  }
  return true;
}

// The input's gradient of input @ matrix^T, for matrix_of(numbers), by the products that autograd makes.
template <typename MatrixOf>
auto backward_of(const at::Tensor& input, const MatrixOf& matrix_of) {
  const int64_t width = input.size(-1), rows = input.size(-2);
  const std::vector<int64_t> of_rows = {width == 0 ? 0 : input.numel() / width, width};
  const bool folded = is_folded(input);
  const std::vector<int64_t> strides = {input.stride(-2), input.stride(-1)};
  return [matrix_of, sizes = input.sizes().vec(), of_rows, strides, rows, folded](const at::Tensor& gradient,
                                                                                  const at::Tensor& numbers) {
    const at::Tensor matrix = matrix_of(numbers);
    if (folded) return left_gradient(gradient.reshape({-1, matrix.size(0)}), matrix, of_rows, strides).view(sizes);
    const at::Tensor batches = gradient.reshape({-1, rows, matrix.size(0)});
    return batches.bmm(matrix.expand({batches.size(0), -1, -1})).view(sizes);
  };
}

at::Tensor linear(const at::Tensor& input, const Weight& given, const std::optional<at::Tensor>& bias,
                  const ProjectionUse& use) {
  if (given.is_encoded()) return encoded_linear(input, given, bias, use.is_read);
  const at::Tensor& weight = given.parts()[0];
  if ((use.is_read && !use.sums_products) || !may_have_own_node(input, weight)) {
    return at::linear(input, weight, bias);
  }
  const bool narrow = weight.scalar_type() == at::kBFloat16 || weight.scalar_type() == at::kHalf;
  c10::intrusive_ptr<torch_compat::GradientConsumer> consumer;
  if (use.sums_products && narrow && weight.requires_grad()) consumer = torch_compat::consumer_of(weight);
  if (use.is_read && !consumer) return at::linear(input, weight, bias);
  return Linear::apply(input, weight, bias, use.is_read, consumer);
}

}  // namespace

at::Tensor encoded_linear(const at::Tensor& input, const Weight& weight, const std::optional<at::Tensor>& bias,
                          bool is_read) {
  if (input.dim() < 2) return at::linear(input, weight.values(), bias);
  ProductWay way;
  way.forward = [is_read](const at::Tensor& given, const at::Tensor& numbers, const std::optional<at::Tensor>& added) {
    return is_read ? at::linear(given, numbers, added) : without_values(given, numbers.size(0));
  };
  way.backward = backward_of(input, [](const at::Tensor& numbers) { return numbers; });
  return encoded_product(input, weight, std::move(way), bias);
}

at::Tensor times(const at::Tensor& input, const Weight& weight) {
  if (!weight.is_encoded()) return at::matmul(input, weight.parts()[0]);
  ProductWay way;
  way.forward = [](const at::Tensor& given, const at::Tensor& numbers, const auto&) {
    return at::matmul(given, numbers);
  };
  way.backward = backward_of(input, [](const at::Tensor& numbers) { return numbers.t(); });
  return encoded_product(input, weight, std::move(way));
}

at::Tensor project(const at::Tensor& input, const Projection& projection, const ProjectionUse& use) {
  at::Tensor result = linear(input, projection.weight, projection.bias, use);
  if (!projection.adapter) return result;
  const LowRankAdapter& adapter = *projection.adapter;
  const at::ScalarType dtype = result.scalar_type();
  const at::Tensor dropped = at::dropout(input.to(adapter.down.scalar_type()), adapter.dropout, adapter.training);
  const at::Tensor added =
      linear(at::linear(dropped, adapter.down), adapter.up, adapter.up_bias, {.is_read = use.is_read}) *
      adapter.scaling;
  return (result + added).to(dtype);
}

at::Tensor without_values(const at::Tensor& input, int64_t width) {
  std::vector<int64_t> shape = input.sizes().vec();
  shape.back() = width;
  return at::empty(shape, input.options());
}

bool draws_numbers(const Projection& projection) {
  return projection.adapter && projection.adapter->training && projection.adapter->dropout > 0;
}

std::vector<at::Tensor> parameters_of(const Projection& projection) {
  std::vector<at::Tensor> parameters = projection.weight.parts();
  if (projection.bias) parameters.push_back(*projection.bias);
  if (projection.adapter) {
    parameters.insert(parameters.end(), {projection.adapter->down, projection.adapter->up});
    if (projection.adapter->up_bias) parameters.push_back(*projection.adapter->up_bias);
  }
  return parameters;
}

}  // namespace roundpipe::ops
