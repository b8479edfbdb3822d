#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>
#include <doctest/doctest.h>

#include <roundpipe/kernels/numbers.inl>

namespace roundpipe::kernels {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

template <typename T>
T made_of(std::uint16_t bits) {
  T made;
  made.bits = bits;
  return made;
}

template <typename T>
std::uint16_t rounded(float number) {
  T to;
  round_to(to, number);
  return to.bits;
}

// Both NaN, or the same bits.
bool same(float a, float b) {
  return (std::isnan(a) && std::isnan(b)) || std::bit_cast<std::uint32_t>(a) == std::bit_cast<std::uint32_t>(b);
}

double distance(float found, double exact) { return std::abs(found - exact) / std::abs(exact); }

}  // namespace

TEST_CASE("numbers: every number of 16 bits has torch's value, and comes back") {
  for (unsigned bits = 0; bits < 1U << 16; ++bits) {
    const auto half = static_cast<std::uint16_t>(bits);
    CAPTURE(bits);
    const float of_half = to_float(made_of<Float16>(half)), of_bfloat = to_float(made_of<BFloat16>(half));
    REQUIRE(same(of_half, static_cast<float>(c10::Half(half, c10::Half::from_bits()))));
    REQUIRE(same(of_bfloat, static_cast<float>(c10::BFloat16(half, c10::BFloat16::from_bits()))));
    if (!std::isnan(of_half)) REQUIRE(rounded<Float16>(of_half) == half);
    if (!std::isnan(of_bfloat)) REQUIRE(rounded<BFloat16>(of_bfloat) == half);
  }
}

TEST_CASE("numbers: floats are rounded as torch rounds them") {
  const auto check = [](float number) {
    CAPTURE(number);
    REQUIRE(rounded<BFloat16>(number) == c10::BFloat16(number).x);
    REQUIRE(rounded<Float16>(number) == c10::Half(number).x);
  };
  std::mt19937 random(4);
  for (int i = 0; i < 2'000'000; ++i) check(std::bit_cast<float>(static_cast<std::uint32_t>(random())));
  // Ties, their neighbours, and the ends of the formats.
  for (unsigned bits = 0; bits < 1U << 15; ++bits) {
    for (const std::uint32_t tie : {bits << 16 | 0x8000U, bits << 16 | 0x7fffU, bits << 16 | 0x8001U}) {
      check(std::bit_cast<float>(tie));
      check(-std::bit_cast<float>(tie));
    }
    for (const std::uint32_t rest : {0x1000U, 0xfffU, 0x1001U}) check(std::bit_cast<float>(bits << 13 | rest));
  }
  for (const float number : {65504.0F, 65519.99F, 65520.0F, 65536.0F, 6e-8F, 2.98e-8F, 2.99e-8F, kInfinity, -0.0F})
    check(number);
}

float below(float x) {
  float numbers[kVector] = {x + 1, x + 1, x + 1, x + 1, x + 1, x + 1, x + 1, x + 1};
  exponentials_below(numbers, 1);
  float alone = 0;
  const float given = (x + 1) - 1;
  exponential_below<float, unsigned>(given, alone);
  for (const float number : numbers) REQUIRE((number == alone || (std::isnan(number) && std::isnan(alone))));
  exponential_below<float, unsigned>(x, alone);
  return alone;
}

TEST_CASE("numbers: exponentials and logarithms are within two units of the exact ones") {
  constexpr double kTwoUnits = 2.4e-7;
  for (double x = -87; x < 88.7; x += 0.00091) {
    const auto number = static_cast<float>(x);
    REQUIRE(distance(exponential(number), std::exp(static_cast<double>(number))) < kTwoUnits);
    if (number <= 0) REQUIRE(distance(below(number), std::exp(static_cast<double>(number))) < kTwoUnits);
  }
  // Subnormal results have an absolute last place.
  for (float x = -104; x < -87; x += 0.013F) {
    REQUIRE(std::abs(exponential(x) - std::exp(static_cast<double>(x))) <=
            2 * std::numeric_limits<float>::denorm_min());
  }
  for (double x = 1; x < 1e30; x *= 1.00007) {
    const auto number = static_cast<float>(x);
    const double exact = std::log(static_cast<double>(number));
    REQUIRE(std::abs(logarithm(number) - exact) <= kTwoUnits * std::max(exact, 0.1));
  }
  CHECK(exponential(0) == 1);
  CHECK(below(0) == 1);
  CHECK(below(-87.01F) == 0);
  CHECK(below(-kInfinity) == 0);
  CHECK(std::isnan(below(std::nanf(""))));
  CHECK(exponential(-kInfinity) == 0);
  CHECK(exponential(kInfinity) == kInfinity);
  CHECK(std::isnan(exponential(std::nanf(""))));
  CHECK(logarithm(1) == 0);
  CHECK(logarithm(kInfinity) == kInfinity);
  CHECK(std::isnan(logarithm(std::nanf(""))));
}

}  // namespace roundpipe::kernels
