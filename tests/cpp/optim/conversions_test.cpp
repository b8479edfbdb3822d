#include <string>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/optim/thread_pool.h>

#include "bits.h"

using namespace roundpipe::optim;

namespace {

// One step of SGD.
void sgd(double lr, const Weights& weights, const at::Tensor& gradient) {
  ThreadPool pool(1);
  Hyperparameters hyper;
  hyper.lr = lr;
  ParameterState state;
  update(Algorithm::kSGD, hyper, MomentFormat::kFloat32, state, weights, gradient, {}, pool);
}

}  // namespace

TEST_CASE("conversions: every 16-bit gradient counts as what it is") {
  const at::Tensor bits = at::arange(65536, at::kInt).to(at::kShort);
  for (const std::string& set : instruction_sets()) {
    CAPTURE(set);
    set_instruction_set(set);
    for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
      const at::Tensor gradient = bits.view(dtype);
      const at::Tensor weight = at::zeros({65536});
      sgd(-1, {weight, weight, {}, {}}, gradient);
      CHECK(different_bits(weight, gradient.to(at::kFloat) + 0.0) == 0);
    }
  }
}

TEST_CASE("conversions: fp16 weights are their masters, to nearest, ties to even") {
  at::manual_seed(12);
  // Exponents around those of fp16 with mantissas around ties, and random values.
  const at::Tensor upper = at::arange(0x32000000, 0x48800000, 0x1000, at::kLong).view({-1, 1});
  const at::Tensor lower = at::tensor({0, 1, 0xFFF}, at::kLong);
  const at::Tensor near_ties = (upper + lower).flatten().to(at::kInt);
  const at::Tensor any = at::randint(-(int64_t{1} << 31), int64_t{1} << 31, {500'000}, at::kLong).to(at::kInt);
  const at::Tensor values = at::cat({near_ties, near_ties.bitwise_or(at::full({}, INT32_MIN, at::kInt)), any});
  for (const std::string& set : instruction_sets()) {
    CAPTURE(set);
    set_instruction_set(set);
    const at::Tensor master = values.view(at::kFloat).clone();
    const at::Tensor weight = at::zeros(master.sizes(), at::kHalf);
    sgd(0, {weight, weight, {}, master}, at::zeros_like(master));
    CHECK(different_bits(weight, values.view(at::kFloat).to(at::kHalf)) == 0);
    CHECK(different_bits(master, values.view(at::kFloat)) == 0);
  }
}
