#include <roundpipe/quantise/format.h>

#include <limits>
#include <numeric>
#include <stdexcept>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/kernels/kernels.h>
#include <roundpipe/quantise/encoded_tensor.h>
#include <roundpipe/quantise/nested_scales.h>

namespace roundpipe::quantise {

using at::Tensor;

namespace {

int64_t bytes_of(const std::vector<Tensor>& parts) {
  return std::accumulate(parts.begin(), parts.end(), int64_t{0},
                         [](int64_t sum, const Tensor& part) { return sum + static_cast<int64_t>(part.nbytes()); });
}

}  // namespace

TEST_CASE("formats: the parts are those that are said, and decode to the shape") {
  at::manual_seed(0);
  for (const std::string& name : format_names()) {
    CAPTURE(name);
    const Format& format = find_format(name);
    CHECK(format.name() == name);
    for (const std::vector<int64_t>& sizes : {std::vector<int64_t>{96, 64}, {3, 40, 32}, {64}, {1, 64}}) {
      const Tensor numbers = at::randn(sizes).to(at::kBFloat16);
      const std::vector<Tensor> encoded = format.encode(numbers);
      const std::vector<Part> parts = format.parts(sizes);
      REQUIRE(encoded.size() == parts.size());
      REQUIRE(encoded.size() == format.suffixes().size());
      for (size_t i = 0; i < parts.size(); ++i) {
        CHECK((encoded[i].sizes() == at::IntArrayRef(parts[i].sizes)));
        CHECK((encoded[i].scalar_type() == parts[i].dtype));
        CHECK(format.suffixes()[i] == parts[i].suffix);
      }
      CHECK((format.sizes_of(encoded[0].sizes()) == sizes));
      const std::vector<Tensor> empty = format.encode(numbers.to(at::kMeta));
      for (size_t i = 0; i < parts.size(); ++i) CHECK((empty[i].is_meta() && empty[i].sizes() == encoded[i].sizes()));
      CHECK((format.decode(empty, at::kHalf).sizes() == at::IntArrayRef(sizes)));
      const Tensor decoded = format.decode(encoded, at::kBFloat16);
      CHECK((decoded.sizes() == at::IntArrayRef(sizes)));
      CHECK((decoded - numbers).abs().max().item<double>() < 0.3 * numbers.abs().max().item<double>());
    }
  }
}

TEST_CASE("formats: bits a number") {
  const Tensor numbers = at::ones({1024, 1024}).to(at::kBFloat16);
  const auto bits = [&](const char* name) {
    return 8.0 * static_cast<double>(bytes_of(find_format(name).encode(numbers))) / (1 << 20);
  };
  CHECK(bits("nf4") == 4.5);
  CHECK(bits("nf4-double") == doctest::Approx(4.127).epsilon(0.003));
  CHECK(bits("mxfp4") == 4.25);
  CHECK(bits("int8") == doctest::Approx(8.03).epsilon(0.001));
}

TEST_CASE("formats: scales of 8 bits") {
  const Tensor map = dynamic_map();
  CHECK(map.numel() == 256);
  CHECK(map[255].item<float>() == 1.0f);
  CHECK(map[127].item<float>() == 0.0f);  // 127 negative numbers, 0, 127 positive ones, and 1
  CHECK(std::get<0>(map.sort()).equal(map));
  CHECK(map[128].item<float>() == doctest::Approx(5.5e-7));  // the only one of the lowest decade
  for (const int64_t count : {1, 255, 256, 257, 1000}) {
    const Tensor scales = at::rand({count}) + 0.5;
    const std::vector<Tensor> parts = nest(scales);
    const Tensor back = flattened(parts);
    CHECK((back.sizes() == scales.sizes()));
    CHECK((back - scales).abs().max().item<double>() < 0.01);
    const Tensor own = parts[3].index({parts[0].to(at::kLong)});
    const Tensor of_first = own.slice(0, 0, 256) * parts[1][0] + parts[2];
    CHECK(at::equal(back.slice(0, 0, 256), of_first));
  }
}

TEST_CASE("formats: what has no form is refused") {
  CHECK_THROWS_WITH(find_format("nf5"), "[quantise] the format is 'nf5', expected one of nf4, nf4-double, mxfp4, int8");
  const Format& nf4 = find_format("nf4");
  CHECK(nf4.reason_against({4, 3}) == "has rows of 3 numbers, expected a multiple of 2 for nf4");
  CHECK(nf4.reason_against({}) == "has no dimensions, expected rows of numbers");
  CHECK(nf4.reason_against({0, 4}) == "has no numbers");
  CHECK(nf4.reason_against({4, 6}).empty());
  CHECK_FALSE(find_format("mxfp4").reason_against({4, 48}).empty());
  for (const std::string& name : format_names()) {
    Tensor numbers = at::ones({4, 64});
    numbers[2][7] = std::numeric_limits<float>::quiet_NaN();
    CHECK_THROWS_AS(find_format(name).encode(numbers), std::invalid_argument);
    CHECK_THROWS_AS(find_format(name).encode(numbers.fill_(-std::numeric_limits<float>::infinity())),
                    std::invalid_argument);
  }
  const std::vector<Tensor> parts = find_format("nf4-double").encode(at::ones({4, 64}));
  CHECK_THROWS_AS(find_format("nf4").decode(parts, at::kFloat), std::invalid_argument);
  std::vector<Tensor> wrong = parts;
  wrong[4] = wrong[4].slice(0, 1);
  CHECK_THROWS_AS(find_format("nf4-double").decode(wrong, at::kFloat), std::invalid_argument);
}

TEST_CASE("an encoded tensor: transposed ones, and one matrix of several") {
  at::manual_seed(1);
  for (const std::string& name : format_names()) {
    CAPTURE(name);
    const Format& format = find_format(name);
    const EncodedTensor plain({&format, at::kFloat}, format.encode(at::randn({5, 8, 64})));
    const EncodedTensor transposed({&format, at::kFloat, /*transposed=*/true}, plain.parts());
    CHECK((transposed.sizes() == std::vector<int64_t>{5, 64, 8}));
    CHECK(at::equal(transposed.values(), plain.values().transpose(1, 2)));
    CHECK(transposed.values().is_contiguous());
    const std::vector<EncodedTensor> some = transposed.select({3, 0});
    CHECK(some.size() == 2);
    CHECK(at::equal(some[0].values(), transposed.values()[3]));
    CHECK(at::equal(some[1].values(), transposed.values()[0]));
  }
  const Format& nf4 = find_format("nf4");
  const EncodedTensor odd({&nf4, at::kFloat}, nf4.encode(at::randn({4, 3, 16})));
  CHECK_THROWS_AS(odd.select({0}), std::invalid_argument);
}

}  // namespace roundpipe::quantise
