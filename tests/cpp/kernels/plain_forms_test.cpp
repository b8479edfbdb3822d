#include <array>
#include <optional>
#include <tuple>

#include <string_view>

#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <doctest/doctest.h>

#include <roundpipe/kernels/kernels.h>
#include <roundpipe/kernels/plain_forms.h>

namespace roundpipe::kernels {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

namespace {

constexpr std::array kDtypes = {at::kBFloat16, at::kHalf, at::kFloat};

template <typename Signature>
auto kernel_of(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

Tensor numbers(at::IntArrayRef sizes, at::ScalarType dtype) { return at::randn(sizes).to(dtype); }

// The same dtype, shape and layout, and numbers that differ by a rounding at most.
void check_close(const Tensor& plain, const Tensor& fused) {
  CHECK((plain.sizes() == fused.sizes()));
  CHECK((plain.scalar_type() == fused.scalar_type()));
  CHECK(plain.is_contiguous());
  const double unit = fused.scalar_type() == at::kFloat ? 1e-5 : fused.scalar_type() == at::kHalf ? 1e-3 : 8e-3;
  CHECK(at::allclose(plain.to(at::kDouble), fused.to(at::kDouble), unit, unit, true));
}

}  // namespace

TEST_CASE("plain forms: norms") {
  at::manual_seed(0);
  const auto forward =
      kernel_of<std::tuple<Tensor, Tensor, Tensor>(const Tensor&, const MaybeTensor&, const Tensor&, double)>(
          "roundpipe::_rms_norm");
  const auto backward =
      kernel_of<std::tuple<Tensor, Tensor>(const Tensor&, const MaybeTensor&, const Tensor&, const Tensor&,
                                           const Tensor&, bool)>("roundpipe::_rms_norm_backward");
  for (const auto dtype : kDtypes) {
    for (const auto weight_dtype : {dtype, at::kFloat}) {
      const Tensor input = numbers({3, 5, 72}, dtype).transpose(0, 1), weight = numbers({72}, weight_dtype);
      for (const MaybeTensor& other : {MaybeTensor(), MaybeTensor(numbers({5, 3, 72}, dtype))}) {
        const auto [sum, normed, scales] = forward.call(input, other, weight, 1e-6);
        const auto [plain_sum, plain_normed, plain_scales] = plain::norm(input, other, weight, 1e-6);
        check_close(plain_sum, sum);
        check_close(plain_normed, normed);
        check_close(plain_scales, scales);
        for (const bool trains : {true, false}) {
          const Tensor gradient = numbers({5, 3, 72}, dtype);
          const auto [of_input, of_weight] = backward.call(gradient, other, input, weight, scales, trains);
          const auto [plain_input, plain_weight] = plain::norm_backward(gradient, other, input, weight, scales, trains);
          check_close(plain_input, of_input);
          check_close(plain_weight, of_weight);
        }
      }
    }
  }
}

TEST_CASE("plain forms: rotary positions") {
  at::manual_seed(0);
  const auto turn = kernel_of<Tensor(const Tensor&, const Tensor&, const Tensor&, bool)>("roundpipe::_rotary");
  for (const auto dtype : kDtypes) {
    const Tensor states = numbers({2, 4, 3, 10}, dtype).transpose(1, 2);
    for (const int64_t rows : {1, 2}) {
      for (const int64_t width : {5, 10}) {
        const Tensor cos = numbers({rows, 3, width}, dtype), sin = numbers({rows, 3, width}, dtype);
        for (const bool backward : {false, true}) {
          check_close(plain::turn(states, cos, sin, backward), turn.call(states, cos, sin, backward));
        }
      }
    }
  }
}

TEST_CASE("plain forms: gates") {
  at::manual_seed(0);
  const auto forward =
      kernel_of<Tensor(const Tensor&, const MaybeTensor&, std::optional<double>, double)>("roundpipe::_gate");
  const auto backward = kernel_of<std::tuple<Tensor, Tensor>(
      const Tensor&, const Tensor&, const MaybeTensor&, std::optional<double>, double)>("roundpipe::_gate_backward");
  for (const auto dtype : kDtypes) {
    for (const char* const form : {"two", "halves", "clamped"}) {
      CAPTURE(form);
      const auto alpha = std::string_view(form) == "clamped" ? std::optional<double>(1.7) : std::nullopt;
      const Tensor first = numbers({4, 30}, dtype);
      const MaybeTensor up = std::string_view(form) == "two" ? MaybeTensor(numbers({4, 30}, dtype)) : MaybeTensor();
      const Tensor result = forward.call(first, up, alpha, 0.5), gradient = numbers(result.sizes(), dtype);
      check_close(plain::gate(first, up, alpha, 0.5), result);
      const auto [of_first, of_up] = backward.call(gradient, first, up, alpha, 0.5);
      const auto [plain_first, plain_up] = plain::gate_backward(gradient, first, up, alpha, 0.5);
      check_close(plain_first, of_first);
      check_close(plain_up, of_up);
    }
  }
}

TEST_CASE("plain forms: the cross-entropy, and sums in fp32") {
  at::manual_seed(0);
  for (const auto dtype : kDtypes) {
    const Tensor labels = at::tensor({3, -100, 0, 7, -1}, at::kLong);  // one ignored, two out of range
    Tensor logits = 4 * numbers({5, 7}, dtype);
    for (const bool writes : {false, true}) {
      const Tensor plain_logits = logits.clone();
      const Tensor plain_losses = plain::token_losses(plain_logits, labels, -100, writes);
      check_close(plain_losses, cross_entropy_(logits, labels, -100, writes));
      check_close(plain_logits, logits);
    }
    const Tensor addends = numbers({4, 3}, dtype), plain_sums = at::ones({4, 3});
    Tensor sums = at::ones({4, 3});
    plain::add_to(plain_sums, addends);
    add_wide_(sums, addends);
    CHECK(at::equal(plain_sums, sums));
  }
}

}  // namespace roundpipe::kernels
