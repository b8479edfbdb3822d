#include <roundpipe/memory/crossing.h>

#include <cstdint>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include "place_of.h"

using namespace roundpipe::memory;

namespace {

bool dense(const at::Tensor& tensor) { return tensor.is_non_overlapping_and_dense(); }

const std::vector<at::ScalarType> kTypes = {at::kBool,   at::kByte, at::kBFloat16,     at::kFloat,
                                            at::kDouble, at::kLong, at::kComplexFloat, at::kComplexDouble};

}  // namespace

TEST_CASE("crossing: up to twice the values a tensor stays where it is, gaps, order and offset included") {
  const at::Tensor base = at::randn({8, 6, 10});
  for (const at::Tensor& tensor :
       {base, base.permute({2, 0, 1}), base.slice(2, 0, 10, 2), base.slice(2, 3, 8), base.narrow(0, 1, 5),
        base.transpose(0, 2).slice(0, 1, 10, 2), base.unfold(2, 4, 1), base.select(1, 3).slice(0, 2, 3),
        base.as_strided({3, 4, 4}, {7, 3, 1}, 5), at::randn({}), base.narrow(2, 0, 0)}) {
    CAPTURE(tensor.sizes());
    CAPTURE(tensor.strides());
    CHECK(settled(tensor).is_same(tensor));
  }
}

TEST_CASE("crossing: a wider span is made dense, the order of dimensions kept") {
  const at::Tensor base = at::randn({8, 6, 30});
  const at::Tensor thin = base.slice(2, 0, 30, 3).transpose(0, 1);
  const at::Tensor packed = settled(thin);
  CHECK(at::equal(packed, thin));
  CHECK(dense(packed));
  CHECK(packed.strides() == at::IntArrayRef({10, 60, 1}));
  CHECK(place_of(packed) == 0);
  CHECK(settled(packed).is_same(packed));
  // The limit is twice the values: 2 of 4 columns, where the last row's gap does not count, and 2 of 5.
  const at::Tensor rows = at::randn({9, 4});
  const at::Tensor half = rows.narrow(1, 0, 2);
  CHECK(settled(half).is_same(half));
  CHECK(dense(settled(at::randn({9, 5}).narrow(1, 0, 2))));
  // One value in each of many rows, and rows far apart.
  CHECK(dense(settled(at::randn({9, 5}).select(1, 2))));
  CHECK(dense(settled(at::randn({100, 5}).slice(0, 0, 100, 50))));
  // Overlapping, and still wide.
  const at::Tensor windows = at::randn({1000}).unfold(0, 4, 2).slice(0, 0, 500, 250);
  CHECK(dense(settled(windows)));
  CHECK(at::equal(settled(windows), windows));
}

TEST_CASE("crossing: broadcast dimensions do not count, and stay") {
  const at::Tensor base = at::randn({6, 30});
  const at::Tensor even = base.slice(1, 0, 30, 2).unsqueeze(0).expand({5, 6, 15});
  CHECK(settled(even).is_same(even));
  const at::Tensor thin = base.slice(1, 0, 30, 3).unsqueeze(1).expand({6, 4, 10});
  const at::Tensor packed = settled(thin);
  CHECK(at::equal(packed, thin));
  CHECK(packed.strides() == at::IntArrayRef({10, 0, 1}));
  CHECK(settled_bytes(thin) == 60 * 4);
  CHECK(settled_bytes(even) == (5 * 30 + 29) * 4);
}

TEST_CASE("crossing: a copy lies alike, in every dtype and at every offset") {
  for (const at::ScalarType type : kTypes) {
    const at::Tensor base = at::arange(0, 240).to(type).view({2, 120});
    for (const int64_t offset : {0, 1, 3, 7, 16, 33}) {
      const at::Tensor flat = base[1].narrow(0, offset, 80);
      for (const at::Tensor& tensor :
           {flat, flat.slice(0, 0, 80, 2), flat.view({8, 10}).t().slice(1, 1, 7), flat.unfold(0, 5, 2),
            flat.slice(0, 0, 80, 2).unsqueeze(1).expand({40, 3}), flat[5], flat.narrow(0, 3, 0)}) {
        CAPTURE(static_cast<int>(type));
        CAPTURE(offset);
        CAPTURE(tensor.strides());
        const at::Tensor copy = copy_alike(tensor);
        CHECK(at::equal(copy, tensor));
        CHECK((copy.scalar_type() == tensor.scalar_type()));
        CHECK(copy.strides() == tensor.strides());
        CHECK(place_of(copy) == place_of(tensor));
        CHECK_FALSE(spans_overlap(copy, tensor));
        CHECK(copy.storage().nbytes() < static_cast<size_t>(settled_bytes(tensor) + kKept_bytes));
      }
    }
  }
}

TEST_CASE("crossing: an address that is no multiple of the element size is kept as far as it can be") {
  alignas(64) static char bytes[256] = {};
  const at::Tensor odd = at::from_blob(bytes + 6, {12}, at::kFloat);
  CHECK(place_of(copy_alike(odd)) == 4);
  CHECK(at::equal(copy_alike(odd), odd));
}

TEST_CASE("crossing: overlapping elements go on overlapping") {
  const at::Tensor windows = at::arange(10, at::kFloat).unfold(0, 4, 1);
  CHECK(settled_bytes(windows) == 10 * 4);
  at::Tensor copy = copy_alike(windows);
  copy.select(0, 0).select(0, 3).fill_(-1);
  CHECK(copy.select(0, 3).select(0, 0).item<float>() == -1);
  CHECK(windows.select(0, 3).select(0, 0).item<float>() == 3);
}

TEST_CASE("crossing: lazy conjugates and negatives are carried out where they lie") {
  const at::Tensor base = at::randn({6, 8}, at::kComplexFloat);
  const at::Tensor conjugate = base.narrow(0, 1, 4).conj();
  REQUIRE(conjugate.is_conj());
  for (const at::Tensor& lazy : {conjugate, at::_neg_view(base.slice(1, 0, 8, 2)), at::imag(conjugate)}) {
    const at::Tensor done = settled(lazy);
    CHECK_FALSE(done.is_conj());
    CHECK_FALSE(done.is_neg());
    CHECK(at::equal(done, lazy));
    CHECK(done.strides() == lazy.strides());
    CHECK(place_of(done) == place_of(lazy));
  }
}

TEST_CASE("crossing: gradients that have no memory of their own get some; other kinds of values are left alone") {
  const at::Tensor sparse = at::eye(3).to_sparse();
  CHECK(settled(sparse).is_same(sparse));
  CHECK(at::equal(settled_gradient(sparse), at::eye(3)));
  CHECK(at::equal(settled_gradient(at::_efficientzerotensor({2, 3}, at::kFloat)), at::zeros({2, 3})));
  CHECK_FALSE(settled_gradient(at::Tensor()).defined());
  const at::Tensor meta = at::empty({2, 3}, at::kMeta);
  CHECK(settled(meta).is_same(meta));
  CHECK(settled_bytes(meta) == 0);
}

TEST_CASE("crossing: autograd sees a copy that is made dense, and a result that it does not see is no view") {
  const at::Tensor wide = at::randn({6, 9}).requires_grad_();
  const at::Tensor packed = settled(wide.slice(1, 0, 9, 4));
  packed.sum().backward();
  CHECK(at::equal(wide.grad().select(1, 4), at::ones({6})));
  CHECK(at::equal(wide.grad().select(1, 1), at::zeros({6})));
  CHECK_FALSE(copy_alike(at::randn({40}).narrow(0, 3, 20)).is_view());
}

TEST_CASE("crossing: memory is shared where spans meet") {
  const at::Tensor base = at::randn({4, 10});
  CHECK(spans_overlap(base, base.slice(1, 3, 4)));
  CHECK(spans_overlap(base.narrow(1, 0, 5), base.narrow(1, 5, 5)));  // their rows alternate
  CHECK_FALSE(spans_overlap(base[0], base[1]));
  CHECK_FALSE(spans_overlap(base, base.clone()));
  CHECK_FALSE(spans_overlap(base, base.narrow(0, 1, 0)));
}
