#include <roundpipe/ops/projection.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

namespace roundpipe::ops {

at::Tensor project(const at::Tensor& input, const Projection& projection) {
  at::Tensor result = at::linear(input, projection.weight, projection.bias);
  if (!projection.adapter) return result;
  const LowRankAdapter& adapter = *projection.adapter;
  const at::ScalarType dtype = result.scalar_type();
  const at::Tensor within = at::linear(input.to(adapter.down.scalar_type()), adapter.down);
  const at::Tensor added = at::linear(within, adapter.up) * adapter.scaling;
  return (result + added).to(dtype);
}

std::vector<at::Tensor> parameters_of(const Projection& projection) {
  std::vector<at::Tensor> parameters = {projection.weight};
  if (projection.bias) parameters.push_back(*projection.bias);
  if (projection.adapter) parameters.insert(parameters.end(), {projection.adapter->down, projection.adapter->up});
  return parameters;
}

}  // namespace roundpipe::ops
