#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/kernels/kernels.h>
#include <roundpipe/kernels/plain_forms.h>

namespace roundpipe::kernels {

using at::Tensor;

namespace {

constexpr at::ScalarType kDtypes[] = {at::kBFloat16, at::kHalf, at::kFloat};

// The published tables.
const std::vector<float> kQuantiles = {-1.0f,
                                       -0.6961928009986877f,
                                       -0.5250730514526367f,
                                       -0.39491748809814453f,
                                       -0.28444138169288635f,
                                       -0.18477343022823334f,
                                       -0.09105003625154495f,
                                       0.0f,
                                       0.07958029955625534f,
                                       0.16093020141124725f,
                                       0.24611230194568634f,
                                       0.33791524171829224f,
                                       0.44070982933044434f,
                                       0.5626170039176941f,
                                       0.7229568362236023f,
                                       1.0f};
const std::vector<float> kE2m1 = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                  -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

bool same_bits(const Tensor& a, const Tensor& b) {
  const auto whole = a.element_size() == 2 ? at::kShort : a.element_size() == 4 ? at::kInt : at::kByte;
  return a.scalar_type() == b.scalar_type() && at::equal(a.contiguous().view(whole), b.contiguous().view(whole));
}

struct Form {
  std::string name;
  int64_t block;
  int64_t width;
};
// Blocks within rows, across them, that end early, larger than a piece, and rows of odd lengths.
const std::vector<Form> kForms = {{"nf4", 64, 128}, {"nf4", 64, 6},       {"nf4", 4096, 3000}, {"mxfp4", 32, 96},
                                  {"mxfp4", 8, 24}, {"int4", 128, 256},   {"int4", 24, 24},    {"int8", 72, 72},
                                  {"int8", 13, 13}, {"int8", 5000, 5000}, {"fp8", 24, 24},     {"fp8", 128, 256}};

}  // namespace

TEST_CASE("encodings: every code has its published value, and is that value's code") {
  const auto all = at::arange(16, at::kLong);
  const auto check = [&](const std::string& form, const std::vector<float>& table, bool high_first, const Tensor& one) {
    const Tensor first = all.repeat_interleave(16), second = all.repeat({16});
    const Tensor codes =
        (high_first ? first.bitwise_left_shift(4) + second : second.bitwise_left_shift(4) + first).to(at::kByte);
    const Tensor scales = one.expand({8}).contiguous();
    const Tensor values = at::tensor(table, at::kFloat);
    const Tensor expected = at::stack({values.index({first}), values.index({second})}, -1).flatten();
    const Tensor decoded = decode({codes.view({8, 32}), scales}, form, 64, at::kFloat);
    CHECK(same_bits(decoded.flatten(), expected));
    const EncodedNumbers again = encode(expected.view({8, 64}), form, 64);
    CHECK(at::equal(again.codes.flatten(), codes));
    CHECK(at::equal(again.scales, scales));
  };
  check("nf4", kQuantiles, true, at::ones({1}, at::kFloat));
  check("mxfp4", kE2m1, false, at::full({1}, 127, at::kByte));
  const Tensor digits = all.repeat_interleave(16) + all.repeat({16}).bitwise_left_shift(4);
  const Tensor integers = at::stack({all.repeat_interleave(16), all.repeat({16})}, -1).view({4, 128}) - 8;
  const EncodedNumbers four{digits.to(at::kByte).view({4, 64}), at::ones({4}, at::kFloat)};
  CHECK(same_bits(decode(four, "int4", 128, at::kFloat), integers.to(at::kFloat)));
  const Tensor bytes = at::arange(-127, 128, at::kFloat).view({1, -1});
  const EncodedNumbers whole = encode(bytes, "int8", bytes.size(1));
  CHECK(at::equal(whole.codes.to(at::kFloat), bytes));
  CHECK(same_bits(decode(whole, "int8", bytes.size(1), at::kFloat), bytes));
}

TEST_CASE("encodings: E4M3 is torch's") {
  const Tensor codes = at::arange(256, at::kLong).to(at::kByte).view({2, 128});
  const Tensor values = codes.view(at::kFloat8_e4m3fn).to(at::kFloat);
  const Tensor decoded = decode({codes.view(at::kChar), at::ones({2}, at::kFloat)}, "fp8", 128, at::kFloat);
  CHECK(at::equal(at::isnan(decoded), at::isnan(values)));
  CHECK(same_bits(at::nan_to_num(decoded), at::nan_to_num(values)));
  at::manual_seed(3);
  // From the smallest numbers that are not 0 to the largest one, and all ties.
  Tensor numbers = at::cat({at::randn({4000}) * at::exp2(at::rand({4000}) * 20 - 12), values.flatten().slice(0, 0, 127),
                            (values.flatten().slice(0, 0, 126) + values.flatten().slice(0, 1, 127)) / 2});
  numbers = at::cat({numbers.clamp(-448, 448), at::full({1}, 448.0)}).view({1, -1});
  const EncodedNumbers encoded = encode(numbers, "fp8", numbers.size(1));
  CHECK(encoded.scales.item<float>() == 1.0f);
  CHECK(at::equal(encoded.codes.view(at::kByte), numbers.to(at::kFloat8_e4m3fn).view(at::kByte)));
}

TEST_CASE("encodings: numbers are near, and decode with the same bits by torch's own operators") {
  at::manual_seed(0);
  for (const Form& form : kForms) {
    CAPTURE(form.name);
    CAPTURE(form.width);
    for (const auto dtype : kDtypes) {
      const Tensor numbers = (at::randn({7, form.width}) * at::rand({7, 1})).to(dtype);
      const EncodedNumbers encoded = encode(numbers, form.name, form.block);
      for (const auto to : kDtypes) {
        const Tensor decoded = decode(encoded, form.name, form.block, to);
        CHECK((decoded.sizes() == numbers.sizes()));
        const Tensor plain = at::empty(numbers.sizes(), at::TensorOptions(to));
        plain::decode(encoded.codes, encoded.scales, form.name, form.block, plain);
        CHECK(same_bits(decoded, plain));
      }
      const Tensor error = (decode(encoded, form.name, form.block, at::kFloat) - numbers.to(at::kFloat)).abs();
      const double share = form.name == "int8"   ? 0.51 / 127
                           : form.name == "fp8"  ? 0.51 / 14
                           : form.name == "int4" ? 0.51 / 7.5
                           : form.name == "nf4"  ? 0.153
                                                 : 0.26;
      CHECK(error.max().item<double>() <= share * numbers.abs().max().item<double>());
    }
  }
}

TEST_CASE("encodings: each number gets the nearest value, the lower of two for nf4, the even one for mxfp4") {
  at::manual_seed(1);
  const Tensor values = at::tensor(kQuantiles, at::kFloat);
  Tensor numbers = at::rand({64, 64}) * 2 - 1;
  numbers.select(1, 0).fill_(1);
  const Tensor bounds = (values.slice(0, 0, 15) + values.slice(0, 1, 16)) / 2;
  numbers.select(0, 0).slice(0, 1, 16).copy_(bounds);
  const Tensor expected = values.index({at::bucketize(numbers, bounds)});
  CHECK(same_bits(decode(encode(numbers, "nf4", 64), "nf4", 64, at::kFloat), expected));
  const Tensor ties = at::tensor({0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0}, at::kFloat).repeat({4}).view({1, 32});
  const Tensor even = at::tensor({0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0}, at::kFloat).repeat({4}).view({1, 32});
  CHECK(same_bits(decode(encode(-ties, "mxfp4", 32), "mxfp4", 32, at::kFloat), -even));
}

TEST_CASE("encodings: the ends of the range") {
  const float tiny = std::numeric_limits<float>::min(), huge = std::numeric_limits<float>::max() / 2;
  for (const Form& form :
       {Form{"nf4", 64, 64}, Form{"mxfp4", 32, 64}, Form{"int4", 32, 64}, Form{"int8", 64, 64}, Form{"fp8", 64, 64}}) {
    CAPTURE(form.name);
    for (const float number : {0.0f, tiny, tiny / 4, 1e-40f, 1.0f, huge}) {
      CAPTURE(number);
      const Tensor numbers = at::full({2, 64}, number);
      const Tensor decoded = decode(encode(numbers, form.name, form.block), form.name, form.block, at::kFloat);
      CHECK(at::isfinite(decoded).all().item<bool>());
      const double error = (decoded.to(at::kDouble) - numbers.to(at::kDouble)).abs().max().item<double>();
      CHECK(error <= 0.26 * number + 2e-38);
    }
    for (const float number : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
      Tensor numbers = at::ones({2, 64});
      numbers[1][3] = number;
      const Tensor decoded = decode(encode(numbers, form.name, form.block), form.name, form.block, at::kFloat);
      CHECK(at::isfinite(decoded[0]).all().item<bool>());
      CHECK_FALSE(at::isfinite(decoded[1]).all().item<bool>());  // the loss would not be finite either
    }
  }
  CHECK(std::isnan(decode({at::zeros({1, 16}, at::kByte), at::full({1}, 255, at::kByte)}, "mxfp4", 32, at::kFloat)[0][0]
                       .item<float>()));
}

TEST_CASE("encodings: what does not fit is refused") {
  const Tensor numbers = at::ones({4, 64});
  const EncodedNumbers encoded = encode(numbers, "nf4", 64);
  CHECK_THROWS_AS(encode(numbers, "nf3", 64), std::invalid_argument);
  CHECK_THROWS_AS(encode(numbers, "nf4", 48), std::invalid_argument);
  CHECK_THROWS_AS(encode(numbers.slice(1, 0, 63), "nf4", 64), std::invalid_argument);
  CHECK_THROWS_AS(encode(numbers.to(at::kDouble), "nf4", 64), std::invalid_argument);
  CHECK_THROWS_AS(encode(at::ones({4, 64}).requires_grad_(), "nf4", 64), std::invalid_argument);
  CHECK_THROWS_AS(decode({encoded.codes.to(at::kChar), encoded.scales}, "nf4", 64, at::kFloat), std::invalid_argument);
  CHECK_THROWS_AS(decode({encoded.codes, encoded.scales.slice(0, 1)}, "nf4", 64, at::kFloat), std::invalid_argument);
  CHECK_THROWS_AS(decode(encoded, "mxfp4", 64, at::kFloat), std::invalid_argument);
  CHECK_THROWS_AS(decode(encoded, "nf4", 64, at::kInt), std::invalid_argument);
  CHECK(decode(encode(numbers.slice(0, 0, 0), "nf4", 64), "nf4", 64, at::kFloat).numel() == 0);
}

TEST_CASE("encodings: tensors without values have the shapes") {
  const Tensor numbers = at::empty({6, 64}, at::TensorOptions(at::kBFloat16).device(at::kMeta));
  const EncodedNumbers encoded = encode(numbers, "nf4", 64);
  CHECK((encoded.codes.sizes() == at::IntArrayRef{6, 32}));
  CHECK(encoded.codes.is_meta());
  const Tensor decoded = decode(encoded, "nf4", 64, at::kBFloat16);
  CHECK((decoded.sizes() == numbers.sizes()));
  CHECK(decoded.is_meta());
}

}  // namespace roundpipe::kernels
