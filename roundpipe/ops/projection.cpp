#include <roundpipe/ops/projection.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

namespace roundpipe::ops {

at::Tensor project(const at::Tensor& input, const Projection& projection) {
  at::Tensor result = at::linear(input, projection.weight, projection.bias);
  if (!projection.adapter) return result;
  const LowRankAdapter& adapter = *projection.adapter;
  const at::ScalarType dtype = result.scalar_type();
  const at::Tensor dropped = at::dropout(input.to(adapter.down.scalar_type()), adapter.dropout, adapter.training);
  const at::Tensor added = at::linear(at::linear(dropped, adapter.down), adapter.up, adapter.up_bias) * adapter.scaling;
  return (result + added).to(dtype);
}

bool draws_numbers(const Projection& projection) {
  return projection.adapter && projection.adapter->training && projection.adapter->dropout > 0;
}

std::vector<at::Tensor> parameters_of(const Projection& projection) {
  std::vector<at::Tensor> parameters = {projection.weight};
  if (projection.bias) parameters.push_back(*projection.bias);
  if (projection.adapter) {
    parameters.insert(parameters.end(), {projection.adapter->down, projection.adapter->up});
    if (projection.adapter->up_bias) parameters.push_back(*projection.adapter->up_bias);
  }
  return parameters;
}

}  // namespace roundpipe::ops
