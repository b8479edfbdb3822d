#include <roundpipe/models/head_layer.h>

#include <ATen/Functions.h>
#include <ATen/core/Reduction.h>
#include <doctest/doctest.h>

#include <roundpipe/models/decoder.h>
#include <roundpipe/models/token_loss.h>

namespace roundpipe::models {
namespace head_layer_test {

using runtime::Values;

constexpr int64_t kRows = 2, kTokens = 5, kWidth = 8, kVocabulary = 7;
constexpr double kEps = 1e-5;

struct Fixture {
  at::Tensor hidden = at::linspace(-1, 1, kRows * kTokens * kWidth).reshape({kRows, kTokens, kWidth});
  at::Tensor labels = at::arange(kRows * kTokens).reshape({kRows, kTokens}).remainder(kVocabulary);
  at::Tensor norm = at::linspace(0.5, 1.5, kWidth);
  ops::Projection head{at::linspace(-2, 2, kVocabulary* kWidth).sin().reshape({kVocabulary, kWidth})};
  HeadCall call;

  Fixture() {
    labels[0][1] = kIgnoredLabel;
    call.hidden = 1;
    call.labels = 0;
    call.inputs = 2;
  }

  std::vector<at::Tensor> run(const std::vector<at::Tensor>& inputs) {
    const auto code = make_head_code({norm, head}, [this](const Values& /*inputs*/) { return &call; });
    code->configure(std::make_shared<const HeadConfig>(HeadConfig{kEps}));
    const std::optional<Values> outputs = code->forward({inputs, nullptr}, {});
    return outputs ? outputs->tensors : std::vector<at::Tensor>{};
  }

  at::Tensor logits() const { return at::linear(rms_norm(hidden, norm, kEps), head.weight.values()); }

  // Of the labels that count, each belongs to the token before it.
  at::Tensor losses() const {
    const at::Tensor chances = at::log_softmax(logits(), -1);
    std::vector<at::Tensor> found;
    for (int64_t row = 0; row < kRows; ++row) {
      for (int64_t token = 1; token < kTokens; ++token) {
        const auto label = labels[row][token].item<int64_t>();
        if (label != kIgnoredLabel) found.push_back(-chances[row][token - 1][label]);
      }
    }
    return at::stack(found);
  }
};

TEST_CASE_FIXTURE(Fixture, "head layer: the mean loss times the share, and the logits if they are wanted") {
  call.share = 0.25;
  std::vector<at::Tensor> found = run({labels, hidden});
  REQUIRE(found.size() == 1);
  CHECK(at::allclose(found[0], losses().mean() * 0.25));
  call.gives_logits = true;
  found = run({labels, hidden});
  REQUIRE(found.size() == 2);
  CHECK(at::allclose(found[0], losses().mean() * 0.25));
  CHECK(at::equal(found[1], logits()));
}

TEST_CASE_FIXTURE(Fixture, "head layer: a number of items divides the sum") {
  call.items = 2;
  call.inputs = 3;
  CHECK(at::allclose(run({labels, hidden, at::tensor(3)})[0], losses().sum() / 3));
}

TEST_CASE_FIXTURE(Fixture, "head layer: without labels, there are logits") {
  call.labels.reset();
  const std::vector<at::Tensor> found = run({labels, hidden});
  REQUIRE(found.size() == 1);
  CHECK(at::equal(found[0], logits()));
}

TEST_CASE_FIXTURE(Fixture, "head layer: other inputs are not its own") { CHECK(run({hidden}).empty()); }

TEST_CASE_FIXTURE(Fixture, "token loss: in chunks, sum and mean are the same") {
  const at::Tensor states = rms_norm(hidden, norm, kEps);
  head.bias = at::linspace(-1, 1, kVocabulary);
  for (const bool mean : {false, true}) {
    const at::Tensor whole = token_loss(states, head, labels, {mean, std::nullopt});
    CHECK(at::allclose(token_loss(states, head, labels, {mean, 3}), whole));
    CHECK(at::equal(token_loss(states, head, labels, {mean, kRows * kTokens}), whole));  // fits one chunk
    at::Tensor logits;
    CHECK(at::equal(token_loss(states, head, labels, {mean, 3}, &logits), whole));  // all logits are wanted
    CHECK(logits.sizes() == at::IntArrayRef({kRows, kTokens, kVocabulary}));
  }
}

}  // namespace head_layer_test
}  // namespace roundpipe::models
