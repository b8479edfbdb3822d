#include <roundpipe/models/embedding_layer.h>

#include <ATen/Functions.h>
#include <doctest/doctest.h>

#include <roundpipe/ops/documents.h>

namespace roundpipe::models {
namespace embedding_layer_test {

using runtime::Values;

struct Fixture {
  at::Tensor weight = at::linspace(-1, 1, 20).reshape({5, 4});
  at::Tensor frequencies = at::linspace(1, 0.5, 2);
  at::Tensor ids = at::tensor({1, 4, 0, 2, 2, 3}, at::kLong).reshape({2, 3});
  EmbeddingCall call;

  Fixture() {
    call.inputs = 1;
    found({}, {});
  }

  // What the caller finds in the batch.
  void found(const at::Tensor& attention_mask, const at::Tensor& positions) {
    call.documents = std::make_shared<ops::Documents>(ops::find_documents(attention_mask, positions, 2, 3));
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
    const auto code = make_embedding_code({weight, frequencies}, [this](const Values& /*inputs*/) { return &call; });
    code->configure(std::make_shared<const EmbeddingConfig>(EmbeddingConfig{-1, 2.0, false}));
    const std::optional<Values> outputs = code->forward({inputs, nullptr}, {});
    return outputs ? outputs->tensors : std::vector<at::Tensor>{};
  }
};

TEST_CASE_FIXTURE(Fixture, "embedding layer: rows of the weight, positions from 0 on, and no mask") {
  const std::vector<at::Tensor> found = run({ids});
  REQUIRE(found.size() == EmbeddingCall::kKept);
  CHECK(at::equal(found[EmbeddingCall::kHidden][0][1], weight[4]));
  CHECK(at::equal(found[EmbeddingCall::kPositions], at::arange(3).unsqueeze(0)));
  CHECK(found[EmbeddingCall::kMask].numel() == 0);
  // Each frequency stands twice.
  const at::Tensor angles = at::outer(at::arange(3).to(at::kFloat), frequencies).repeat({1, 2});
  CHECK(at::allclose(found[EmbeddingCall::kCos][0], angles.cos() * 2));
  CHECK(at::allclose(found[EmbeddingCall::kSin][0], angles.sin() * 2));
}

TEST_CASE_FIXTURE(Fixture, "embedding layer: padding makes a mask, and other values are handed on") {
  call.inputs = 3;
  call.attention_mask = 2;
  call.kept = {1};
  const at::Tensor kept = at::ones({1}), given = at::tensor({0, 1, 1, 1, 1, 1}).reshape({2, 3});
  this->found(given, {});
  const std::vector<at::Tensor> found = run({ids, kept, given});
  REQUIRE(found.size() == EmbeddingCall::kKept + 1);
  CHECK(found.back().is_same(kept));
  const at::Tensor seen = found[EmbeddingCall::kMask];
  CHECK(at::equal(seen[1][0], at::ones({3, 3}, at::kBool).tril()));
  CHECK_FALSE(seen[0][0][2][0].item<bool>());
}

TEST_CASE_FIXTURE(Fixture, "embedding layer: given positions count, and separate documents") {
  call.inputs = 2;
  call.positions = 1;
  const at::Tensor positions = at::tensor({0, 1, 0}).expand({2, 3});
  this->found({}, positions);
  const std::vector<at::Tensor> found = run({ids, positions});
  CHECK(at::equal(found[EmbeddingCall::kCos][0][2], found[EmbeddingCall::kCos][0][0]));
  CHECK_FALSE(found[EmbeddingCall::kMask][0][0][2][1].item<bool>());
  call.attention = Attention::kPacked;  // whose layers take the documents themselves
  CHECK(run({ids, positions})[EmbeddingCall::kMask].numel() == 0);
}

TEST_CASE_FIXTURE(Fixture, "embedding layer: other inputs are not its own") { CHECK(run({ids, ids}).empty()); }

}  // namespace embedding_layer_test
}  // namespace roundpipe::models
