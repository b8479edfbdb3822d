#include <roundpipe/ops/wide_product.h>

#include <algorithm>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <roundpipe/kernels/kernels.h>

namespace roundpipe::ops {

namespace {

using WideProduct = at::Tensor&(const at::Tensor& self, const at::Tensor& mat1, const at::Tensor& mat2,
                                at::ScalarType out_dtype, const at::Scalar& beta, const at::Scalar& alpha,
                                at::Tensor& out);

std::optional<c10::OperatorHandle> found_product() {
  static const std::optional<c10::OperatorHandle> found =
      c10::Dispatcher::singleton().findSchema({"aten::addmm", "dtype_out"});
  return found;
}

}  // namespace

bool has_wide_product(c10::DeviceType device, at::ScalarType dtype) {
  if (dtype == at::kHalf && at::globalContext().allowFP16AccumulationCuBLAS()) return false;
  const std::optional<c10::OperatorHandle> product = found_product();
  return product && device != c10::kMeta &&
         product->hasKernelForDispatchKey(c10::computeDispatchKey(at::kFloat, c10::kStrided, device));
}

void add_wide_product(const at::Tensor& sums, const at::Tensor& left, const at::Tensor& right, double scale,
                      int64_t scratch, bool add) {
  at::Tensor to = sums;
  const int before = add ? 1 : 0;
  if (left.scalar_type() == at::kFloat) {
    at::addmm_out(to, to, left, right, before, scale);
    return;
  }
  if (has_wide_product(sums.device().type(), left.scalar_type())) {
    found_product()->typed<WideProduct>().call(to, left, right, at::kFloat, before, scale, to);
    return;
  }
  const int64_t rows = left.size(0), width = right.size(1);
  const int64_t block = std::clamp<int64_t>(scratch / std::max<int64_t>(1, width), 1, std::max<int64_t>(1, rows));
  const at::Tensor memory = at::empty({block, width}, right.options());
  for (int64_t begin = 0; begin < rows; begin += block) {
    const int64_t count = std::min(block, rows - begin);
    at::Tensor product = memory.narrow(0, 0, count), part = to.narrow(0, begin, count);
    at::addmm_out(product, product, left.narrow(0, begin, count), right, 0, scale);
    add ? kernels::add_wide_(part, product) : static_cast<void>(part.copy_(product));
  }
}

}  // namespace roundpipe::ops
