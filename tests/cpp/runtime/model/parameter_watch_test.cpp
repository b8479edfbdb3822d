#include <roundpipe/runtime/model/parameter_watch.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>

#include <doctest/doctest.h>

using roundpipe::runtime::ParameterWatch;

TEST_SUITE("parameter watch") {
  TEST_CASE("writes are found with and without a version") {
    const at::NoGradGuard no_grad;
    at::Tensor a = at::ones({4}), b = at::ones({4});
    ParameterWatch watch({a, b}, {1, 0});
    CHECK(watch.has_values(0));
    CHECK_FALSE(watch.has_values(1));
    CHECK_FALSE(watch.touched(0));
    a.mul_(1);
    CHECK(watch.touched(0));
    CHECK(watch.look(0));
    CHECK_FALSE(watch.touched(0));
    a.set_data(a.clone());
    CHECK(watch.touched(0));
    CHECK(watch.look(0));
    b.add_(1);
    CHECK(watch.touched(1));
    a.mutable_data_ptr<float>()[2] = 2;  // as a write to `.data`
    CHECK_FALSE(watch.touched(0));
    CHECK_FALSE(watch.look(0));
  }

  TEST_CASE("values that were moved are not touched") {
    at::Tensor a = at::ones({4});
    ParameterWatch watch({a}, {1});
    a.set_data(a.clone());
    watch.moved();
    CHECK_FALSE(watch.touched(0));
    CHECK_NOTHROW(watch.require_kept("layer 3 (mine)", {"scale"}));
    a.set_data(a * 2);
    CHECK_THROWS_WITH_AS(watch.require_kept("layer 3 (mine)", {"scale"}),
                         doctest::Contains("[forward] layer 3 (mine) changes its parameter 'scale' in its forward"),
                         std::invalid_argument);
  }
}
