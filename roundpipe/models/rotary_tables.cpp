#include <roundpipe/models/rotary_tables.h>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

namespace roundpipe::models {

using at::Tensor;

std::pair<Tensor, Tensor> rotary_tables(const Tensor& positions, const Tensor& frequencies, double scaling,
                                        c10::ScalarType dtype, bool halves) {
  const at::NoGradGuard no_grad;
  const Tensor angles = positions.unsqueeze(-1).to(at::kFloat) * frequencies;
  const Tensor all = halves ? angles : at::cat({angles, angles}, -1);
  return {(all.cos() * scaling).to(dtype), (all.sin() * scaling).to(dtype)};
}

}  // namespace roundpipe::models
