#include <roundpipe/runtime/row_slices.h>

#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>

#include <roundpipe/runtime/shells.h>

using namespace roundpipe::runtime;

namespace {

Flow flow_of(std::vector<at::Tensor> tensors, std::vector<char> requires_grad) {
  Flow flow;
  flow.host.resize(tensors.size());
  flow.tensors = std::move(tensors);
  flow.requires_grad = std::move(requires_grad);
  return flow;
}

}  // namespace

TEST_CASE("rows: dimension 0 of what needs gradients; one row, or gradients into something shared, cannot be cut") {
  const at::Tensor values = at::randn({6, 3}), mask = at::randn({1, 3}), scalar = at::randn({});
  CHECK(rows_of(flow_of({values, mask}, {1, 0})) == 6);
  CHECK(rows_of(flow_of({values}, {0})) == 6);
  CHECK(rows_of(flow_of({values, mask}, {1, 1})) == 0);
  CHECK(rows_of(flow_of({values, scalar}, {1, 1})) == 0);
  CHECK(rows_of(flow_of({mask}, {1})) == 0);
  CHECK(rows_of(flow_of({}, {})) == 0);
}

TEST_CASE("rows: parts joined again are the whole, and what is handed on stays itself") {
  const at::Tensor values = at::randn({6, 3}), tokens = at::randn({12, 2}), mask = at::randn({1, 3});
  const Flow inputs = flow_of({values, tokens, mask}, {1, 0, 0});
  std::vector<Flow> parts, outputs;
  for (const auto& [first, last] : {std::pair<int64_t, int64_t>{0, 4}, {4, 6}}) {
    parts.push_back(slice_rows(inputs, 6, first, last));
    const Flow& part = parts.back();
    CHECK(part.tensors[1].size(0) == 2 * (last - first));
    CHECK(part.tensors[2].is_same(mask));
    outputs.push_back(flow_of({part.tensors[0] * 2, part.tensors[1], part.tensors[2]}, {1, 0, 0}));
  }
  const Flow joined = join_rows(inputs, 6, parts, outputs);
  CHECK(at::equal(joined.tensors[0], values * 2));
  CHECK(joined.requires_grad[0]);
  CHECK(joined.tensors[1].is_same(tokens));
  CHECK(joined.tensors[2].is_same(mask));

  outputs[1].tensors[0] = at::randn({});
  outputs[0].tensors[0] = at::randn({});
  CHECK_THROWS_AS(join_rows(inputs, 6, parts, outputs), std::invalid_argument);
}

TEST_CASE("sink: a microbatch that runs anew adds what had not come, once") {
  GradientSink sink;
  sink.reset(2);
  sink.targets = {at::zeros({2}), at::zeros({2})};
  const auto ones = [] { return at::ones({2}); };
  sink.begin_microbatch();
  sink.consume(0, ones());
  REQUIRE(sink.can_retry());
  sink.retry();
  sink.consume(0, ones());
  sink.consume(1, ones());
  sink.begin_microbatch();
  sink.consume(0, ones());
  CHECK(at::equal(sink.targets[0], at::full({2}, 2.0)));
  CHECK(at::equal(sink.targets[1], ones()));
}

TEST_CASE("sink: rows of a microbatch add up, also when some of them are cut again") {
  GradientSink sink;
  sink.reset(2);
  sink.targets = {at::zeros({1}), at::zeros({1})};
  const auto one = [] { return at::ones({1}); };
  sink.begin_microbatch();
  for (int rows = 0; rows < 2; ++rows) {
    const auto outer = sink.begin_rows();
    // Parameter 1 had come for all of these rows when memory ran out.
    sink.consume(1, one());
    sink.retry();
    for (int half = 0; half < 2; ++half) {
      const auto inner = sink.begin_rows();
      sink.consume(1, one());
      sink.consume(0, one());
      sink.end_rows(inner);
    }
    sink.end_rows(outer);
  }
  CHECK(sink.targets[0].item<float>() == 4);
  CHECK(sink.targets[1].item<float>() == 2);
  // All of it counts as come when the whole microbatch runs anew.
  sink.retry();
  sink.consume(0, one());
  sink.consume(1, one());
  CHECK(sink.targets[0].item<float>() == 4);
  CHECK(sink.targets[1].item<float>() == 2);

  sink.begin_microbatch();
  sink.consume(0, one());
  sink.consume(0, one());
  CHECK_FALSE(sink.can_retry());
}
