#include <roundpipe/ops/packed_attention.h>

#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <tuple>
#include <vector>

#include <ATen/ATen.h>
#include <doctest/doctest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/library.h>

using namespace roundpipe::ops;

namespace {

constexpr int64_t kTokens = 9;

struct Heads {
  at::Tensor query, key, value;
  Heads to(c10::ScalarType dtype) const { return {query.to(dtype), key.to(dtype), value.to(dtype)}; }
};

Heads heads(int64_t width = 4) {
  at::Generator generator = at::detail::createCPUGenerator(5);
  const auto drawn = [&](int64_t count) { return at::randn({2, count, kTokens, width}, generator, at::kDouble); };
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

// What torch's flash attention takes and returns, in fp32 from document to document.
using FlashResult = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
int flash_calls = 0;
std::optional<c10::impl::LocalDispatchKeySet> outside;  // a kernel, where autograd records

at::Tensor flash_attend(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                        const at::Tensor& starts, double scale) {
  std::vector<at::Tensor> parts;
  for (int64_t i = 0; i + 1 < starts.numel(); ++i) {
    const int64_t begin = starts[i].item<int64_t>(), end = starts[i + 1].item<int64_t>();
    const auto heads = [&](const at::Tensor& flat) { return flat.slice(0, begin, end).transpose(0, 1).to(at::kFloat); };
    const int64_t groups = query.size(1) / key.size(1);
    at::Tensor scores = heads(query).matmul(heads(key).repeat_interleave(groups, 0).transpose(-1, -2)) * scale;
    scores = scores.masked_fill(at::ones_like(scores).tril().eq(0), -std::numeric_limits<double>::infinity());
    const at::Tensor outputs = scores.softmax(-1).matmul(heads(value).repeat_interleave(groups, 0));
    parts.push_back(outputs.transpose(0, 1).to(query.scalar_type()));
  }
  return at::cat(parts);
}

FlashResult flash_forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const std::optional<at::Tensor>& starts, const std::optional<at::Tensor>& /*of_keys*/,
                          c10::SymInt longest, c10::SymInt longest_key, double dropout, bool causal, bool /*debug*/,
                          std::optional<double> scale, std::optional<c10::SymInt> /*left*/,
                          std::optional<c10::SymInt> /*right*/, const std::optional<at::Tensor>& /*used*/,
                          const std::optional<at::Tensor>& /*slopes*/, const std::optional<at::Tensor>& /*blocks*/,
                          std::optional<int64_t> /*splits*/) {
  ++flash_calls;
  CHECK(causal);
  CHECK(dropout == 0);
  CHECK(longest == at::diff(*starts).max().item<int64_t>());
  CHECK(longest == longest_key);
  const at::Tensor none = at::empty({0});
  return {flash_attend(query, key, value, *starts, *scale), none, none, none, none};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& gradient, const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& /*out*/, const at::Tensor& /*logsumexp*/, const at::Tensor& starts, const at::Tensor& /*of_keys*/,
    c10::SymInt /*longest*/, c10::SymInt /*longest_key*/, double /*dropout*/, bool /*causal*/,
    const at::Tensor& /*state*/, const at::Tensor& /*unused*/, std::optional<double> scale,
    std::optional<c10::SymInt> /*left*/, std::optional<c10::SymInt> /*right*/) {
  const at::AutoGradMode with_grad(true);
  const c10::impl::ForceDispatchKeyGuard recording(*outside);
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& input : {query, key, value}) inputs.push_back(input.detach().requires_grad_(true));
  const at::Tensor output = flash_attend(inputs[0], inputs[1], inputs[2], starts, *scale);
  const auto found = torch::autograd::grad({output}, inputs, {gradient});
  return {found[0], found[1], found[2]};
}

// Torch's flash attention as on an accelerator that has it, while one of these lives.
struct WithFlashKernel {
  WithFlashKernel() {
    flash_calls = 0;
    outside.emplace(c10::impl::tls_local_dispatch_key_set());
    library.impl("_flash_attention_forward", flash_forward);
    library.impl("_flash_attention_backward", flash_backward);
  }
  torch::Library library{torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__};
};

// The output and the gradients of query, key and value.
std::vector<at::Tensor> trained(const Heads& given, const Documents& documents, const PackedAttentionOptions& options,
                                const at::Tensor& gradient) {
  std::vector<at::Tensor> inputs;
  for (const at::Tensor& input : {given.query, given.key, given.value}) {
    inputs.push_back(input.detach().requires_grad_(true));
  }
  const at::Tensor output = packed_attention(inputs[0], inputs[1], inputs[2], documents, options);
  std::vector<at::Tensor> found = torch::autograd::grad({output}, inputs, {gradient});
  found.insert(found.begin(), output.detach());
  return found;
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
        const Documents documents{window, rows};
        const at::Tensor output = packed_attention(given.query, given.key, given.value, documents, options);
        // The softmax of bounded scores is in fp32, as in transformers.
        const double tolerance = softcap > 0 ? 1e-6 : 1e-12;
        CHECK(at::allclose(output, slow(given, rows, window, softcap), tolerance, tolerance));
      }
    }
  }
}

TEST_CASE("packed attention: documents of another batch are refused") {
  const Heads given = heads();
  CHECK_THROWS_AS(packed_attention(given.query, given.key, given.value, {0, {{9}, {8}}}), std::invalid_argument);
}

TEST_CASE("packed attention: where documents start among the tokens of all rows") {
  CHECK(document_starts({0, {{-2, 3, 4}, {9}}}).equal(at::tensor({0, 2, 5, 9, 18}, at::kInt)));
}

TEST_CASE("packed attention: all documents in one call where torch has a kernel") {
  const Heads given = heads(8).to(at::kBFloat16);
  const at::Tensor gradient =
      at::linspace(-1, 1, 2 * kTokens * 32, at::kFloat).reshape({2, kTokens, 4, 8}).to(at::kBFloat16);
  for (const Documents& documents : {Documents{0, {{4, 5}, {9}}}, Documents{0, {{-2, 3, 4}, {3, 3, -3}}}}) {
    PackedAttentionOptions options;
    options.scaling = 0.5;
    const std::vector<at::Tensor> expected = trained(given, documents, options, gradient);
    options.starts = document_starts(documents);
    const std::vector<at::Tensor> without = trained(given, documents, options, gradient);
    const WithFlashKernel flash;
    const std::vector<at::Tensor> found = trained(given, documents, options, gradient);
    CHECK(flash_calls == 1);
    for (size_t i = 0; i < expected.size(); ++i) {
      CHECK(without[i].equal(expected[i]));
      CHECK(at::allclose(found[i].to(at::kFloat), expected[i].to(at::kFloat), 2e-2, 2e-2));
    }
  }
}

TEST_CASE("packed attention: what one call cannot do is computed as without it") {
  const Documents whole{0, {{4, 5}, {9}}}, with_window{3, whole.rows};
  const WithFlashKernel flash;
  PackedAttentionOptions options;
  options.starts = document_starts(whole);
  const auto run = [&](const Heads& given, const Documents& documents) {
    packed_attention(given.query, given.key, given.value, documents, options);
    return flash_calls;
  };
  const Heads half = heads(8).to(at::kHalf);
  CHECK(run(half, with_window) == 0);
  CHECK(run(heads(8), whole) == 0);
  CHECK(run(heads().to(at::kHalf), whole) == 0);
  options.softcap = 1.5;
  CHECK(run(half, whole) == 0);
  options.softcap.reset();
  options.sinks = at::zeros({4});
  CHECK(run(half, whole) == 0);
  options.sinks.reset();
  options.starts.reset();
  CHECK(run(half, whole) == 0);
  options.starts = document_starts(whole);
  CHECK(run(half, whole) == 1);
}
