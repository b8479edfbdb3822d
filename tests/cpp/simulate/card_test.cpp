#include <roundpipe/simulate/card.h>

#include <limits>
#include <stdexcept>

#include <doctest/doctest.h>

using namespace roundpipe::simulate;

TEST_CASE("card: products, attention and element-wise bytes take their time one after the other") {
  const LayerWork work{.product_operations = 6e12, .attention_operations = 1e12, .element_bytes = 4e9};
  CHECK(time_ms(work, {}) == 0);
  CHECK(time_ms(work, {.product_tflops = 100}) == doctest::Approx(60));
  const Card card{.product_tflops = 100, .attention_tflops = 50, .memory_gb_per_s = 1000};
  CHECK(time_ms(work, card) == doctest::Approx(60 + 20 + 4));
}

TEST_CASE("card: no work is faster than its launches") {
  const LayerWork work{.product_operations = 1e9, .products = 7, .attentions = 1, .element_kernels = 52};
  CHECK(time_ms(work, {.product_tflops = 100, .launch_us = 5}) == doctest::Approx(60 * 0.005));
  CHECK(time_ms(work, {.product_tflops = 1, .launch_us = 5}) == doctest::Approx(1));
}

TEST_CASE("card: work adds up") {
  const LayerWork one{1, 2, 3, 4, 5, 6};
  LayerWork work = one;
  work += one;
  CHECK(work.product_operations == 2);
  CHECK(work.element_kernels == 12);
  work -= one;
  CHECK(work.attention_operations == 2);
  CHECK(work.element_bytes == 3);
  CHECK(work.products == 4);
  CHECK(work.attentions == 5);
}

TEST_CASE("card: sums of gradients are read and written in fp32") {
  CHECK(gradient_sums(2'000'000).element_bytes == 1e6 * (2 + 4 + 4));
}

TEST_CASE("card: bad numbers") {
  CHECK_THROWS_AS(time_ms({}, {.product_tflops = -1}), std::invalid_argument);
  CHECK_THROWS_AS(time_ms({}, {.launch_us = std::numeric_limits<double>::quiet_NaN()}), std::invalid_argument);
  CHECK_THROWS_AS(time_ms({.element_bytes = -1}, {}), std::invalid_argument);
}
