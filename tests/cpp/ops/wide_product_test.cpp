#include <roundpipe/ops/wide_product.h>

#include <ATen/Context.h>
#include <doctest/doctest.h>
#include <torch/library.h>

using roundpipe::ops::has_wide_product;

namespace {

// Of a device that no other test uses. Asked for, never called.
at::Tensor& wide_product(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::ScalarType, const at::Scalar&,
                         const at::Scalar&, at::Tensor& out) {
  return out;
}

TORCH_LIBRARY_IMPL(aten, HPU, library) { library.impl("addmm.dtype_out", wide_product); }

}  // namespace

TEST_CASE("wide product: a device has it if torch has a kernel") {
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    CHECK(has_wide_product(c10::kHPU, dtype));
    CHECK_FALSE(has_wide_product(c10::kMTIA, dtype));
    CHECK_FALSE(has_wide_product(c10::kMeta, dtype));
  }
}

TEST_CASE("wide product: fp16 has none while its products are added up in fp16") {
  at::globalContext().setAllowFP16AccumulationCuBLAS(true);
  CHECK_FALSE(has_wide_product(c10::kHPU, at::kHalf));
  CHECK(has_wide_product(c10::kHPU, at::kBFloat16));
  at::globalContext().setAllowFP16AccumulationCuBLAS(false);
  CHECK(has_wide_product(c10::kHPU, at::kHalf));
}
