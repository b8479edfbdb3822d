#include <roundpipe/runtime/call/batch_cut.h>

#include <stdexcept>

#include <doctest/doctest.h>

using namespace roundpipe::runtime;

namespace {

using Role = BatchLeaf::Role;
using Sizes = std::vector<int64_t>;

BatchLeaf leaf(const char* name, Sizes shape, Role role = Role::kArgument, Cut cut = {}) {
  return {name, std::move(shape), cut, role};
}

BatchLeaf ready(const char* name, Sizes rows, Role role = Role::kArgument, Cut cut = {}) {
  const int count = static_cast<int>(rows.size());
  return {name, {}, cut, role, count, std::move(rows)};
}

// The sizes of each leaf's parts; none: whole.
std::vector<Sizes> sizes_of(const std::vector<LeafCut>& cuts) {
  std::vector<Sizes> sizes;
  for (const LeafCut& cut : cuts) sizes.push_back(cut.dimension < 0 ? Sizes{} : cut.sizes);
  return sizes;
}

std::vector<Sizes> cut(std::vector<BatchLeaf> leaves, int count) {
  return sizes_of(InputCut(std::move(leaves)).cut(count));
}

}  // namespace

TEST_SUITE("batch cut") {
  TEST_CASE("whose rows are the batch's") {
    // The arguments', most of them; then the keywords'; labels only if there is nothing else.
    CHECK(cut({leaf("a", {4}), leaf("b", {6}), leaf("c", {4, 2})}, 2) == std::vector<Sizes>{{2, 2}, {}, {2, 2}});
    CHECK(cut({leaf("a", {4}), leaf("k", {6}, Role::kKeyword), leaf("l", {6}, Role::kKeyword)}, 2) ==
          std::vector<Sizes>{{2, 2}, {}, {}});
    CHECK(cut({leaf("labels", {5, 1}, Role::kLabel)}, 2) == std::vector<Sizes>{{3, 2}});
    CHECK(InputCut({leaf("labels", {2}, Role::kLabel), leaf("ids", {6}, Role::kKeyword)}).rows(2) == Sizes{3, 3});
    CHECK(InputCut({leaf("scalar", {})}).rows(2) == std::nullopt);
    CHECK(InputCut({leaf("a", {3, 8}, Role::kArgument, Cut::along(-1)), leaf("b", {8})}).rows(2) == Sizes{4, 4});
  }

  TEST_CASE("what goes whole although it has other rows is named") {
    CHECK(InputCut({leaf("a", {4}), leaf("row", {1, 3})}).doubts().empty());
    CHECK(InputCut({leaf("a", {4}), leaf("table", {6}, Role::kKeyword)}).doubts().empty());
    CHECK(InputCut({leaf("a", {4}), leaf("b", {6, 2}), leaf("c", {7}, Role::kArgument, Cut::whole())}).doubts() ==
          "[inputs] some tensors do not have the rows of the batch of 4 rows, as a, so every microbatch gets these "
          "whole: b [6, 2]; say how they are cut, or that they are whole (RunOptions::cut_inputs in C++, split_input "
          "in Python)");
  }

  TEST_CASE("a label among the inputs has the rows of the batch") {
    const InputCut inputs({leaf("ids", {8, 5}, Role::kKeyword), leaf("labels", {4, 5}, Role::kLabel)});
    CHECK(inputs.cut(1).size() == 2);  // the model itself sees both
    CHECK_THROWS_WITH_AS(inputs.cut(2),
                         doctest::Contains("[labels] labels has 4 rows (shape [4, 5]) and the batch has 8"),
                         std::invalid_argument);
    CHECK_THROWS_AS(cut({leaf("ids", {8}, Role::kKeyword), leaf("labels", {1}, Role::kLabel)}, 8),
                    std::invalid_argument);
    CHECK(cut({leaf("ids", {8}, Role::kKeyword), leaf("labels", {4}, Role::kLabel, Cut::whole())}, 2) ==
          std::vector<Sizes>{{4, 4}, {}});
  }

  TEST_CASE("tensors beside values that are cut follow their rows") {
    const std::vector<BatchLeaf> leaves{ready("packed", {1, 3}), leaf("mask", {4}, Role::kKeyword), leaf("row", {1})};
    CHECK(cut(leaves, 2) == std::vector<Sizes>{{}, {1, 3}, {}});
    CHECK(InputCut(leaves).rows(2) == Sizes{1, 3});
    CHECK_THROWS_AS(InputCut(leaves).cut(3), std::invalid_argument);
    CHECK(rows_of({{leaf("a", {2, 9})}, {leaf("a", {5, 9})}}) == Sizes{2, 5});
    CHECK(rows_of({{leaf("a", {2, 9})}, {leaf("a", {})}}) == std::nullopt);
  }

  TEST_CASE("labels follow the rows of the inputs") {
    const auto labels = [](std::vector<BatchLeaf> leaves, MicrobatchRows rows, int count) {
      return sizes_of(cut_labels(leaves, rows, count));
    };
    CHECK(labels({leaf("label", {4})}, Sizes{1, 3}, 2) == std::vector<Sizes>{{1, 3}});
    CHECK(labels({leaf("label", {5})}, std::nullopt, 2) == std::vector<Sizes>{{3, 2}});
    CHECK(labels({leaf("a", {4}), leaf("row", {1, 2})}, Sizes{2, 2}, 2) == std::vector<Sizes>{{2, 2}, {}});
    CHECK(labels({leaf("a", {4}), ready("row", {1, 1})}, Sizes{2, 2}, 2) == std::vector<Sizes>{{2, 2}, {}});
    CHECK(labels({leaf("weights", {3}, Role::kLabel, Cut::whole())}, Sizes{2, 2}, 2) == std::vector<Sizes>{{}});
    CHECK_THROWS_AS(labels({leaf("a", {4}), leaf("b", {5})}, std::nullopt, 2), std::invalid_argument);
    CHECK_THROWS_AS(labels({leaf("a", {1})}, std::nullopt, 2), std::invalid_argument);
    for (const int64_t own : {1, 3, 8}) {
      CHECK_THROWS_AS(labels({leaf("label", {own})}, Sizes{2, 2}, 2), std::invalid_argument);
      CHECK_THROWS_AS(labels({leaf("label", {own})}, Sizes{4}, 1), std::invalid_argument);
    }
    CHECK_THROWS_AS(labels({ready("label", {2, 1})}, Sizes{2, 2}, 2), std::invalid_argument);
    CHECK(labels({ready("label", {2, 1}, Role::kLabel, Cut::whole())}, Sizes{2, 2}, 2) == std::vector<Sizes>{{}});
    BatchLeaf numbers = leaf("label", {});
    numbers.numbers = 4;
    CHECK(labels({numbers}, Sizes{4}, 1) == std::vector<Sizes>{{}});
    CHECK_THROWS_AS(labels({numbers}, Sizes{2, 2}, 2), std::invalid_argument);
  }
}
