#include <roundpipe/ops/wide_product.h>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <doctest/doctest.h>
#include <torch/library.h>

using roundpipe::ops::add_wide_product;
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
    CHECK_FALSE(has_wide_product(c10::kCPU, dtype));
  }
}

TEST_CASE("wide product: fp16 has none while its products are added up in fp16") {
  at::globalContext().setAllowFP16AccumulationCuBLAS(true);
  CHECK_FALSE(has_wide_product(c10::kHPU, at::kHalf));
  CHECK(has_wide_product(c10::kHPU, at::kBFloat16));
  at::globalContext().setAllowFP16AccumulationCuBLAS(false);
  CHECK(has_wide_product(c10::kHPU, at::kHalf));
}

TEST_CASE("wide product: whole or some rows at a time, added or not") {
  at::manual_seed(0);
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf, at::kFloat}) {
    const at::Tensor left = at::randn({9, 7}).to(dtype), right = at::randn({7, 5}).to(dtype);
    const at::Tensor exact = left.to(at::kDouble).mm(right.to(at::kDouble)) * 0.5;
    for (const int64_t scratch : {0, 5, 20, 45, 1000}) {
      CAPTURE(scratch);
      const at::Tensor before = at::randn({9, 5});
      for (const bool add : {false, true}) {
        const at::Tensor sums = before.clone();
        add_wide_product(sums, left, right, 0.5, scratch, add);
        const at::Tensor expected = add ? exact + before.to(at::kDouble) : exact;
        const double tolerance = dtype == at::kBFloat16 ? 3e-2 : dtype == at::kHalf ? 4e-3 : 1e-5;
        CHECK(at::allclose(sums.to(at::kDouble), expected, tolerance, tolerance));
      }
    }
  }
  // Nothing to multiply: what is there stays, or becomes zero.
  const at::Tensor sums = at::ones({2, 3});
  add_wide_product(sums, at::empty({2, 0}, at::kBFloat16), at::empty({0, 3}, at::kBFloat16), 1, 100);
  CHECK(sums.equal(at::ones({2, 3})));
  add_wide_product(sums, at::empty({2, 0}, at::kBFloat16), at::empty({0, 3}, at::kBFloat16), 1, 100, false);
  CHECK(sums.equal(at::zeros({2, 3})));
}
