#include <roundpipe/api/microbatches.h>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

using namespace roundpipe;
using namespace roundpipe::detail;
using at::Tensor;

namespace {

Batch pair_of(const Tensor& a, const Tensor& b) { return batch_of(std::tuple(a, b), true); }

std::vector<std::vector<int64_t>> rows_of(const std::vector<runtime::Values>& parts) {
  std::vector<std::vector<int64_t>> rows;
  for (const runtime::Values& part : parts) {
    rows.emplace_back();
    for (const Tensor& tensor : part.tensors) rows.back().push_back(tensor.size(0));
  }
  return rows;
}

using Rows = std::vector<std::vector<int64_t>>;

}  // namespace

TEST_SUITE("microbatches") {
  TEST_CASE("the number of microbatches") {
    RunOptions options;
    CHECK(count_of(pair_of(at::zeros({9, 2}), at::zeros({9})), options, 4) == 4);
    CHECK(count_of(pair_of(at::zeros({2, 2}), at::zeros({2})), options, 4) == 2);
    CHECK(count_of(batch_of(at::zeros({}), true), options, 4) == 1);
    options.microbatches = 5;
    CHECK(count_of(pair_of(at::zeros({9, 2}), at::zeros({9})), options, 4) == 5);
    CHECK(count_of(pair_of(at::zeros({4, 2}), at::zeros({4})), options, 4) == 4);
    CHECK(count_of(batch_of(at::zeros({}), true), options, 4) == 5);
    CHECK_THROWS_AS(count_of(batch_of(Microbatches<Tensor>{}, true), options, 4), std::invalid_argument);
    CHECK_THROWS_AS(count_of(batch_of(Microbatches<Tensor>{{at::zeros({1})}}, true), options, 4),
                    std::invalid_argument);
    options.microbatches.reset();
    CHECK(count_of(batch_of(Microbatches<Tensor>{{at::zeros({1}), at::zeros({7})}}, true), options, 4) == 2);
  }

  TEST_CASE("inputs are cut along the batch, larger parts first") {
    CHECK(rows_of(cut_inputs(pair_of(at::zeros({7, 2}), at::zeros({7})), 3, {})) == Rows{{3, 3}, {2, 2}, {2, 2}});
    // A single row stands for all rows, and so does a tensor that the options say is whole.
    CHECK(rows_of(cut_inputs(pair_of(at::zeros({4, 2}), at::zeros({1, 2})), 2, {})) == Rows{{2, 1}, {2, 1}});
    CHECK(rows_of(cut_inputs(pair_of(at::zeros({4, 2}), at::zeros({4})), 2, {Cut{}, Cut::whole()})) ==
          Rows{{2, 4}, {2, 4}});
    // Along another dimension, which then says how many rows the batch has.
    CHECK(rows_of(cut_inputs(pair_of(at::zeros({3, 6}), at::zeros({6})), 2, {Cut::along(-1)})) == Rows{{3, 3}, {3, 3}});
    CHECK_THROWS_AS(cut_inputs(pair_of(at::zeros({2, 2}), at::zeros({2})), 3, {}), std::invalid_argument);
    CHECK_THROWS_AS(cut_inputs(pair_of(at::zeros({4}), at::zeros({4})), 2, {Cut::along(1)}), std::invalid_argument);
    CHECK_THROWS_AS(cut_inputs(batch_of(at::zeros({4}), true), 2, {Cut{}, Cut{}}), std::invalid_argument);
    CHECK_THROWS_AS(cut_inputs(batch_of(at::zeros({0, 2}), true), 1, {}), std::invalid_argument);
  }

  TEST_CASE("labels are cut, all of them") {
    const Batch four = batch_of(at::zeros({4, 5}), true);
    CHECK(rows_of(cut_labels(pair_of(at::zeros({4, 2}), at::zeros({1, 2})), four, 2, {})) == Rows{{2, 1}, {2, 1}});
    CHECK_THROWS_AS(cut_labels(pair_of(at::zeros({4}), at::zeros({3})), four, 2, {}), std::invalid_argument);
    CHECK_THROWS_AS(cut_labels(batch_of(Microbatches<Tensor>{{at::zeros({1})}}, true), four, 2, {}),
                    std::invalid_argument);
    CHECK(cut_labels(batch_of(std::tuple<>(), true), four, 3, {}).size() == 3);
  }

  TEST_CASE("labels have the rows of the batch") {
    const auto label = [](int64_t rows) { return batch_of(at::zeros({rows, 1}), false); };
    const Batch eight = batch_of(at::zeros({8, 5}), true);
    // As many as there are microbatches, or fewer: neither cut nor shared in silence; nor in a single microbatch.
    for (const int64_t rows : {1, 4, 16}) {
      for (const int count : {1, 4}) {
        CAPTURE(rows);
        CAPTURE(count);
        CHECK_THROWS_AS(cut_labels(label(rows), eight, count, {}), std::invalid_argument);
      }
      CHECK(rows_of(cut_labels(label(rows), eight, 1, {.cut_labels = {Cut::whole()}})) == Rows{{rows}});
    }
    CHECK_THROWS_WITH_AS(cut_labels(label(4), eight, 4, {}),
                         "[labels] tensor 0 has 4 rows (shape [4, 1]) and the batch has 8, expected a label for each "
                         "row; if they are not rows, say how they are cut or that they are whole "
                         "(RunOptions::cut_labels in C++, split_label in Python), or cut them yourself",
                         std::invalid_argument);
    CHECK(rows_of(cut_labels(label(4), eight, 4, {.cut_labels = {Cut::along(0)}})) == Rows{{1}, {1}, {1}, {1}});
    CHECK(rows_of(cut_labels(label(4), eight, 2, {.cut_labels = {Cut::whole()}})) == Rows{{4}, {4}});
    // The rows of a batch that is cut along another dimension.
    const Batch sequence_first = batch_of(at::zeros({3, 8}), true);
    CHECK(rows_of(cut_labels(label(8), sequence_first, 2, {.cut_inputs = {Cut::along(1)}})) == Rows{{4}, {4}});
    CHECK_THROWS_AS(cut_labels(label(3), sequence_first, 2, {.cut_inputs = {Cut::along(1)}}), std::invalid_argument);
  }

  TEST_CASE("labels beside microbatches that the caller has cut") {
    const auto label = [](int64_t rows) { return batch_of(at::zeros({rows, 1}), false); };
    const Batch uneven = batch_of(Microbatches<Tensor>{{at::zeros({1, 5}), at::zeros({2, 5})}}, true);
    CHECK(rows_of(cut_labels(label(3), uneven, 2, {})) == Rows{{1}, {2}});
    CHECK_THROWS_AS(cut_labels(label(6), uneven, 2, {}), std::invalid_argument);
    const auto ready = [](int64_t first, int64_t second) {
      return batch_of(Microbatches<Tensor>{{at::zeros({first, 1}), at::zeros({second, 1})}}, false);
    };
    CHECK(rows_of(cut_labels(ready(1, 2), uneven, 2, {})) == Rows{{1}, {2}});
    CHECK_THROWS_WITH_AS(cut_labels(ready(1, 1), uneven, 2, {}),
                         doctest::Contains("microbatch 1 of tensor 0 has 1 rows, and that of the inputs has 2"),
                         std::invalid_argument);
    CHECK(rows_of(cut_labels(ready(1, 1), uneven, 2, {.cut_labels = {Cut::whole()}})) == Rows{{1}, {1}});
    CHECK_THROWS_AS(cut_labels(ready(2, 1), batch_of(at::zeros({3, 5}), true), 3, {}), std::invalid_argument);
  }

  TEST_CASE("a row of numbers is no label that can be cut") {
    const Batch four = batch_of(at::zeros({4, 5}), true);
    const Batch numbers = batch_of(std::vector<int64_t>{0, 1, 1, 0}, false);
    CHECK(join<std::vector<int64_t>>(cut_labels(numbers, four, 1, {}).front()).size() == 4);
    CHECK_THROWS_WITH_AS(cut_labels(numbers, four, 2, {}), doctest::Contains("is a sequence of 4 numbers"),
                         std::invalid_argument);
    const Batch cut = batch_of(Microbatches<std::vector<int64_t>>{{{0, 1}, {1, 0}}}, false);
    CHECK(cut_labels(cut, four, 2, {}).size() == 2);
  }

  TEST_CASE("outputs are put together") {
    using Parts = std::tuple<Tensor, Tensor, Tensor>;
    const auto part = [](int rows, double value, int64_t count) {
      return split(Parts(at::full({rows, 2}, value), at::scalar_tensor(value), at::scalar_tensor(count, at::kLong)));
    };
    const auto [rows, mean, count] = join<Parts>(merged({part(2, 1, 3), part(1, 2, 4)}, c10::kCPU));
    CHECK(at::equal(rows.select(1, 0), at::tensor({1.0F, 1.0F, 2.0F})));
    CHECK(mean.item<double>() == 1.5);
    CHECK(count.item<double>() == 3.5);
    const Tensor yes = at::full({}, true, at::kBool);
    CHECK(join<Tensor>(merged({split(yes), split(yes)}, c10::kCPU)).equal(yes));
    CHECK_THROWS_WITH_AS(merged({split(yes), split(yes.logical_not())}, c10::kCPU),
                         doctest::Contains("true in some microbatches"), std::invalid_argument);
    CHECK_THROWS_AS(merged({split(at::zeros({2, 2})), split(at::zeros({2, 3}))}, c10::kCPU), std::invalid_argument);
    CHECK_THROWS_AS(merged({split(at::zeros({2})), split(std::vector<Tensor>{at::zeros({2})})}, c10::kCPU),
                    std::invalid_argument);
  }

  TEST_CASE("tensors that cannot travel are refused") {
    CHECK_THROWS_AS(on_host(batch_of(at::empty({2}, at::kMeta), true), "test"), std::invalid_argument);
    CHECK_THROWS_AS(on_host(batch_of(at::eye(2).to_sparse(), true), "test"), std::invalid_argument);
  }
}
