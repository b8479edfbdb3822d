#include <roundpipe/ops/packed_attention.h>

#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

using namespace roundpipe::ops;

namespace {

constexpr int64_t kTokens = 9;

struct Heads {
  at::Tensor query, key, value;
};

Heads heads() {
  at::Generator generator = at::detail::createCPUGenerator(5);
  const auto drawn = [&](int64_t count) { return at::randn({2, count, kTokens, 4}, generator, at::kDouble); };
  return {drawn(4), drawn(2), drawn(2)};
}

// Attention by the whole matrix of scores: [rows, tokens, heads, width].
at::Tensor slow(const Heads& given, const std::vector<std::vector<int64_t>>& rows, int64_t window, double softcap) {
  const at::Tensor key = given.key.repeat_interleave(2, 1), value = given.value.repeat_interleave(2, 1);
  at::Tensor scores = given.query.matmul(key.transpose(-1, -2)) * 0.5;
  if (softcap > 0) scores = (scores / softcap).tanh() * softcap;
  at::Tensor seen = at::zeros({2, 1, kTokens, kTokens}, at::kBool);
  for (size_t row = 0; row < rows.size(); ++row) {
    int64_t begin = 0;
    for (const int64_t length : rows[row]) {
      for (int64_t i = begin; length > 0 && i < begin + length; ++i) {
        for (int64_t j = begin; j <= i; ++j) {
          if (window == 0 || i - j < window) seen[static_cast<int64_t>(row)][0][i][j] = true;
        }
      }
      begin += std::abs(length);
    }
  }
  const at::Tensor weights =
      scores.masked_fill(~seen, -std::numeric_limits<double>::infinity()).softmax(-1).nan_to_num(0);
  return weights.matmul(value).transpose(1, 2);
}

at::Tensor mask_of(const std::vector<std::vector<int64_t>>& rows, int64_t window) {
  at::Tensor mask = at::zeros({2, 5}, at::kInt);
  for (size_t row = 0; row < rows.size(); ++row) {
    mask[static_cast<int64_t>(row)][0] = window;
    for (size_t i = 0; i < rows[row].size(); ++i) {
      mask[static_cast<int64_t>(row)][static_cast<int64_t>(i + 1)] = rows[row][i];
    }
  }
  return mask;
}

}  // namespace

TEST_CASE("packed attention: each document by itself, with windows, padding and bounded scores") {
  const Heads given = heads();
  for (const auto& rows : std::vector<std::vector<std::vector<int64_t>>>{
           {{9}, {9}}, {{4, 5}, {5, 4}}, {{-2, 3, 4}, {3, 3, 3}}, {{7, -2}, {1, 8}}}) {
    for (const int64_t window : {0, 2, 20}) {
      for (const double softcap : {0.0, 1.5}) {
        PackedAttentionOptions options;
        options.queries_at_once = 3;
        if (softcap > 0) options.softcap = softcap;
        const Documents documents = read_documents(mask_of(rows, window), std::nullopt, 2, kTokens);
        const at::Tensor output = packed_attention(given.query, given.key, given.value, documents, options);
        // The softmax of bounded scores is in fp32, as in transformers.
        const double tolerance = softcap > 0 ? 1e-6 : 1e-12;
        CHECK(at::allclose(output, slow(given, rows, window, softcap), tolerance, tolerance));
      }
    }
  }
}

TEST_CASE("packed attention: a document also ends where positions restart") {
  const at::Tensor mask = mask_of({{9}, {-2, 7}}, 0);
  const at::Tensor positions = at::tensor({0, 1, 2, 3, 0, 1, 2, 3, 4}, at::kLong).unsqueeze(0);
  const Documents documents = read_documents(mask, positions, 2, kTokens);
  CHECK(documents.rows == std::vector<std::vector<int64_t>>{{4, 5}, {-2, 2, 5}});
  CHECK(documents.window == 0);
}

TEST_CASE("packed attention: a mask of another batch is refused") {
  CHECK_THROWS_WITH_AS(
      read_documents(mask_of({{9}, {4, 4}}, 0), std::nullopt, 2, kTokens),
      "[sdpa_packed] the documents of the mask have [9, 8] tokens, expected 9 in each of 2 rows; a mask of two "
      "dimensions may hold only zeros and ones",
      std::invalid_argument);
  CHECK_THROWS_AS(read_documents(mask_of({{9}, {9}}, 0), std::nullopt, 3, kTokens), std::invalid_argument);
}
