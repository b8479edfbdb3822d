#include <cmath>
#include <limits>
#include <string>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/optim/thread_pool.h>

using namespace roundpipe::optim;

TEST_CASE("sum_of_squares: right, and the same bits for every instruction set and number of threads") {
  at::manual_seed(6);
  ThreadPool one(1);
  ThreadPool three(3);
  for (const int64_t count : {0, 1, 255, 256, 257, 3 * 65536 + 19}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const at::Tensor gradient = at::randn({count}).to(dtype);
      const double expected = gradient.to(at::kDouble).mul(0.25).square().sum().item<double>();
      set_instruction_set("baseline");
      const double first = sum_of_squares(gradient, 0.25F, one);
      CHECK(first == doctest::Approx(expected).epsilon(1e-12));
      for (const std::string& set : instruction_sets()) {
        set_instruction_set(set);
        CHECK(sum_of_squares(gradient, 0.25F, one) == first);
        CHECK(sum_of_squares(gradient, 0.25F, three) == first);
      }
    }
  }
}

TEST_CASE("sum_of_squares: not finite exactly when an element is not") {
  ThreadPool pool(2);
  const auto of = [&](float value) {
    at::Tensor gradient = at::ones({1000});
    gradient[321] = value;
    return sum_of_squares(gradient, 2, pool);
  };
  CHECK(std::isfinite(of(std::numeric_limits<float>::max())));
  CHECK(std::isinf(of(-std::numeric_limits<float>::infinity())));
  CHECK(std::isnan(of(std::numeric_limits<float>::quiet_NaN())));
  CHECK(std::isfinite(sum_of_squares(at::full({100}, 65504, at::kHalf), 1, pool)));
}
