#include <roundpipe/runtime/model/value_fingerprint.h>

#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>

#include <doctest/doctest.h>

#include <roundpipe/device/virtual/memory_meter.h>

using roundpipe::runtime::ValueFingerprint;

TEST_SUITE("value fingerprint") {
  TEST_CASE("every bit counts, wherever it lies") {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kDouble, at::kChar, at::kComplexFloat}) {
      CAPTURE(dtype);
      at::Tensor values = at::randn({7, 33}).to(dtype);
      const ValueFingerprint before(values);
      CHECK(ValueFingerprint(values).same_as(before));
      CHECK(ValueFingerprint(values.clone()).same_as(before));
      auto* const bytes = static_cast<uint8_t*>(values.mutable_data_ptr());
      for (const int64_t at :
           {int64_t{0}, static_cast<int64_t>(values.nbytes()) / 2, static_cast<int64_t>(values.nbytes()) - 1}) {
        bytes[at] ^= 1;
        CHECK_FALSE(ValueFingerprint(values).same_as(before));
        bytes[at] ^= 1;
      }
      CHECK(ValueFingerprint(values).same_as(before));
    }
    CHECK_FALSE(ValueFingerprint(at::zeros({3})).same_as(ValueFingerprint(-at::zeros({3}))));
  }

  TEST_CASE("of tensors of any layout") {
    CHECK(ValueFingerprint(at::ones({0})).same_as(ValueFingerprint(at::ones({0}))));
    CHECK_FALSE(ValueFingerprint(at::ones({})).same_as(ValueFingerprint(at::zeros({}))));
    at::Tensor whole = at::rand({6, 8});
    for (const at::Tensor& part : {whole.t(), whole.slice(1, 2, 5), whole[1]}) {
      const ValueFingerprint before(part);
      whole.select(0, 0).select(0, 0).add_(1);  // in the first part alone
      CHECK(ValueFingerprint(part).same_as(before) == !part.is_same_size(whole.t()));
      part.mul_(2);
      CHECK_FALSE(ValueFingerprint(part).same_as(before));
    }
  }

  TEST_CASE("takes no memory on the host") {
    const at::Tensor values = at::randn({1 << 16});
    roundpipe::device::MemoryMeter meter;
    meter.enter();
    const int64_t before = meter.current_bytes();
    CHECK(ValueFingerprint(values).same_as(ValueFingerprint(values)));
    CHECK(meter.peak_bytes() == before);
  }
}
