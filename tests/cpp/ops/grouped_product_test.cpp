#include <roundpipe/ops/grouped_product.h>

#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>

namespace roundpipe::ops {
namespace {

constexpr int64_t kRows = 11, kInputs = 8, kOutputs = 16;

struct Operands {
  at::Tensor rows, matrices, ends;
};

// Groups without rows lie at the begin, in the middle and at the end.
Operands operands(Stacked stacked, at::ScalarType dtype) {
  at::Generator generator = at::detail::createCPUGenerator(3);
  const auto drawn = [&](at::IntArrayRef sizes) {
    return at::randn(sizes, generator, at::kFloat).to(dtype).requires_grad_();
  };
  const bool outputs_first = stacked == Stacked::kOutputsFirst;
  return {drawn({kRows, kInputs}), outputs_first ? drawn({6, kOutputs, kInputs}) : drawn({6, kInputs, kOutputs}),
          at::tensor(std::vector<int32_t>{0, 4, 4, 5, kRows, kRows}, at::kInt)};
}

at::Tensor by_torch(const Operands& given, Stacked stacked) {
  return at::_grouped_mm(
      given.rows, stacked == Stacked::kOutputsFirst ? given.matrices.transpose(1, 2) : given.matrices, given.ends);
}

TEST_CASE("grouped product: values and gradients have the bits of torch's own") {
  for (const Stacked stacked : {Stacked::kOutputsFirst, Stacked::kInputsFirst}) {
    for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      const Operands given = operands(stacked, dtype);
      const at::Tensor found = grouped_product(given.rows, given.matrices, given.ends, stacked);
      const at::Tensor expected = by_torch(given, stacked);
      REQUIRE(at::equal(found, expected));
      const at::Tensor gradient = at::linspace(-1, 1, expected.numel()).reshape(expected.sizes()).to(dtype);
      for (const auto& wanted : {std::vector<at::Tensor>{given.rows, given.matrices}, {given.rows}, {given.matrices}}) {
        const auto mine = torch::autograd::grad({found}, wanted, {gradient}, /*retain_graph=*/true);
        const auto theirs = torch::autograd::grad({expected}, wanted, {gradient}, /*retain_graph=*/true);
        for (size_t i = 0; i < wanted.size(); ++i) CHECK(at::equal(mine[i], theirs[i]));
      }
    }
  }
}

TEST_CASE("grouped product: frozen operands get no gradient, and nothing is kept for them") {
  Operands given = operands(Stacked::kOutputsFirst, at::kFloat);
  given.matrices = given.matrices.detach();
  const auto versions = given.rows._version();
  const at::Tensor found = grouped_product(given.rows, given.matrices, given.ends, Stacked::kOutputsFirst);
  // Only the gradient of the matrices would need the rows.
  at::NoGradGuard no_grad;
  given.rows.zero_();
  CHECK(given.rows._version() != versions);
  const at::AutoGradMode grad(true);
  const auto gradients = torch::autograd::grad({found.sum()}, {given.rows});
  CHECK(gradients[0].sizes() == given.rows.sizes());
}

TEST_CASE("grouped product: what torch refuses is refused") {
  Operands given = operands(Stacked::kOutputsFirst, at::kDouble);
  CHECK_THROWS_AS(grouped_product(given.rows, given.matrices, given.ends, Stacked::kOutputsFirst), c10::Error);
  given = operands(Stacked::kOutputsFirst, at::kFloat);
  CHECK_THROWS_AS(grouped_product(given.rows, given.matrices, given.ends, Stacked::kInputsFirst), c10::Error);
  const at::Tensor odd = at::ones({6, kOutputs, kInputs - 1});
  CHECK_THROWS_AS(grouped_product(given.rows.slice(1, 1), odd, given.ends, Stacked::kOutputsFirst), c10::Error);
}

}  // namespace
}  // namespace roundpipe::ops
