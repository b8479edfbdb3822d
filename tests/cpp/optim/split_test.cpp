#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/optim/thread_pool.h>

using namespace roundpipe::optim;

namespace {

at::Tensor bits_that_come_back(const at::Tensor& bits) {
  ThreadPool pool(2);
  const at::Tensor weight = at::empty(bits.sizes(), at::kBFloat16);
  const at::Tensor remainder = at::empty(bits.sizes(), at::kShort);
  const at::Tensor master = at::empty(bits.sizes(), at::kFloat);
  split(bits.view(at::kFloat), weight, remainder, pool);
  join(weight, remainder, master, pool);
  return master.view(at::kInt);
}

}  // namespace

TEST_CASE("split, join: every bit pattern comes back") {
  at::manual_seed(5);
  // Every upper half with the lower halves around rounding, so all special numbers.
  const at::Tensor upper = at::arange(65536, at::kLong).mul(65536).view({-1, 1});
  const at::Tensor lower = at::tensor({0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF}, at::kLong);
  const at::Tensor special = (upper + lower).flatten().to(at::kInt);
  const at::Tensor any = at::randint(-(int64_t{1} << 31), int64_t{1} << 31, {4'000'001}, at::kLong).to(at::kInt);
  for (const std::string& set : instruction_sets()) {
    CAPTURE(set);
    set_instruction_set(set);
    CHECK(at::equal(bits_that_come_back(special), special));
    CHECK(at::equal(bits_that_come_back(any), any));
  }
}

TEST_CASE("split: the weight is the nearest bf16, ties away from zero") {
  ThreadPool pool(1);
  const auto rounded = [&](int64_t bits) {
    const at::Tensor weight = at::empty({1}, at::kBFloat16);
    split(at::full({1}, bits, at::kInt).view(at::kFloat), weight, at::empty({1}, at::kShort), pool);
    return weight.view(at::kShort).item<int16_t>() & 0xFFFF;
  };
  CHECK(rounded(0x3F800000) == 0x3F80);
  CHECK(rounded(0x3F807FFF) == 0x3F80);
  CHECK(rounded(0x3F808000) == 0x3F81);
  CHECK(rounded(-0x407F8000) == 0xBF81);  // -1.00390625, bits 0xBF808000
  CHECK(rounded(0) == 0);
}

TEST_CASE("split, join: other dtypes and layouts are refused") {
  ThreadPool pool(1);
  const at::Tensor master = at::zeros({4, 4});
  const at::Tensor weight = at::zeros({4, 4}, at::kBFloat16);
  const at::Tensor remainder = at::zeros({4, 4}, at::kShort);
  CHECK_THROWS_AS(split(master.to(at::kHalf), weight, remainder, pool), std::invalid_argument);
  CHECK_THROWS_AS(split(master, weight.to(at::kHalf), remainder, pool), std::invalid_argument);
  CHECK_THROWS_AS(split(master, weight.t(), remainder, pool), std::invalid_argument);
  CHECK_THROWS_AS(join(weight, remainder.narrow(0, 0, 2), master, pool), std::invalid_argument);
}
