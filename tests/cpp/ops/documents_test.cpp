#include <roundpipe/ops/documents.h>

#include <stdexcept>
#include <vector>

#include <ATen/Functions.h>
#include <doctest/doctest.h>

using namespace roundpipe::ops;

namespace {

using Rows = std::vector<std::vector<int64_t>>;

constexpr int64_t kTokens = 9;

at::Tensor table_of(const Rows& rows, int64_t window) {
  at::Tensor table = at::zeros({2, 5}, at::kInt);
  for (size_t row = 0; row < rows.size(); ++row) {
    table[static_cast<int64_t>(row)][0] = window;
    for (size_t i = 0; i < rows[row].size(); ++i) {
      table[static_cast<int64_t>(row)][static_cast<int64_t>(i + 1)] = rows[row][i];
    }
  }
  return table;
}

}  // namespace

TEST_CASE("documents: found where the attention mask changes and where positions restart") {
  const at::Tensor mask = at::tensor({0, 1, 1, 0, 0, 1, 1, 1, 1, 1}).reshape({2, 5});
  const at::Tensor positions = at::tensor({0, 1, 2, 0, 1}, at::kLong).unsqueeze(0);
  CHECK(find_documents({}, {}, 2, 5).rows == Rows{{5}, {5}});
  CHECK(find_documents(mask, {}, 2, 5).rows == Rows{{-1, 2, -2}, {5}});
  CHECK(find_documents({}, positions, 2, 5).rows == Rows{{3, 2}, {3, 2}});
  CHECK(find_documents(mask.to(at::kBool), positions, 2, 5).rows == Rows{{-1, 2, -2}, {3, 2}});
  CHECK(find_documents({}, at::tensor({0, 1, 2, 3, 4, 0, 0, 5, 6, 9}).reshape({2, 5}), 2, 5).rows ==
        Rows{{5}, {1, 1, 2, 1}});
  CHECK(find_documents(mask, positions, 2, 5).window == 0);
  CHECK(with_window(find_documents(mask, positions, 2, 5), 3) == Documents{3, {{-1, 2, -2}, {3, 2}}});
}

TEST_CASE("documents: read from a table, and where positions restart") {
  const at::Tensor positions = at::tensor({0, 1, 2, 3, 0, 1, 2, 3, 4}, at::kLong).unsqueeze(0);
  const at::Tensor table = table_of({{9}, {-2, 7}}, 3);
  CHECK(read_documents(table, std::nullopt, 2, kTokens) == Documents{3, {{9}, {-2, 7}}});
  CHECK(read_documents(table, positions, 2, kTokens) == Documents{3, {{4, 5}, {-2, 2, 5}}});
  CHECK(read_documents(table, positions.expand({3, 1, kTokens}), 2, kTokens).rows == Rows{{9}, {-2, 7}});
}

TEST_CASE("documents: a table of another batch is refused") {
  CHECK_THROWS_WITH_AS(
      read_documents(table_of({{9}, {4, 4}}, 0), std::nullopt, 2, kTokens),
      "[sdpa_packed] the documents of the mask have [9, 8] tokens, expected 9 in each of 2 rows; a mask of two "
      "dimensions may hold only zeros and ones",
      std::invalid_argument);
  CHECK_THROWS_AS(read_documents(table_of({{9}, {9}}, 0), std::nullopt, 3, kTokens), std::invalid_argument);
}

TEST_CASE("documents: what kind of rows they make") {
  struct Kind {
    Rows rows;
    bool padded, inner, right, several;
  };
  for (const Kind& kind :
       {Kind{{{9}, {9}}, false, false, true, false}, Kind{{{7, -2}, {9}}, true, false, true, false},
        Kind{{{-9}, {8, -1}}, true, false, true, false}, Kind{{{-2, 7}, {9}}, true, false, false, false},
        Kind{{{3, -2, 4}, {9}}, true, true, false, true}, Kind{{{-2, 5, -2}, {9}}, true, false, false, false},
        Kind{{{9}, {4, 5}}, false, false, false, true}, Kind{{{4, 4, -1}, {9}}, true, false, false, true}}) {
    const Documents documents{0, kind.rows};
    CHECK(has_padding(documents) == kind.padded);
    CHECK(has_inner_padding(documents) == kind.inner);
    CHECK(is_right_padded(documents) == kind.right);
    CHECK(has_several(documents) == kind.several);
  }
}
