#include <roundpipe/models/masks.h>

#include <limits>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

#include <roundpipe/ops/packed_attention.h>

namespace roundpipe::models {

using at::Tensor;

namespace {

// Which document of its row each token belongs to [rows, tokens]; undefined if each row is one document, or has an
// attention mask.
Tensor documents_of(const TokenPlaces& places) {
  if (places.attention_mask.defined() || !ops::has_several(*places.documents)) return {};
  const Tensor positions = places.positions.expand({places.rows, places.tokens});
  const Tensor steps = at::diff(positions, 1, -1, positions.slice(1, 0, 1) - 1);
  return steps.ne(1).cumsum(-1);
}

// Whether torch's causal attention does the same, but for a window.
bool is_plain(const TokenPlaces& places, bool padding_may_attend) {
  if (!places.attention_mask.defined()) return !ops::has_several(*places.documents);
  return !ops::has_padding(*places.documents) || (padding_may_attend && ops::is_right_padded(*places.documents));
}

// Values of [rows, tokens] as those of queries, [rows, 1, tokens, 1], and of keys.
Tensor of_queries(const Tensor& values) { return values.unsqueeze(1).unsqueeze(-1); }
Tensor of_keys(const Tensor& values) { return values.unsqueeze(1).unsqueeze(1); }

Tensor seen_tokens(const TokenPlaces& places, c10::Device device, std::optional<int64_t> window) {
  const Tensor documents = documents_of(places);
  const Tensor kept = places.attention_mask.defined() ? places.attention_mask.to(device, at::kBool) : Tensor();
  Tensor order = at::arange(places.tokens, at::TensorOptions(at::kLong).device(device)).unsqueeze(0);
  if (documents.defined()) order = places.positions.expand({places.rows, places.tokens});
  const Tensor queries = of_queries(order), keys = of_keys(order);
  Tensor mask = keys.le(queries);
  if (window) mask = keys.gt(queries - *window).logical_and(mask);
  if (documents.defined()) mask = mask.logical_and(of_queries(documents).eq(of_keys(documents)));
  if (kept.defined()) mask = mask.logical_and(of_keys(kept));
  return mask.expand({places.rows, 1, places.tokens, places.tokens});
}

double least_of(c10::ScalarType dtype) {
  if (dtype == at::kBFloat16) return std::numeric_limits<c10::BFloat16>::lowest();
  if (dtype == at::kHalf) return std::numeric_limits<c10::Half>::lowest();
  return std::numeric_limits<float>::lowest();
}

Tensor added_mask(const Tensor& seen, c10::ScalarType dtype) {
  const Tensor zero = at::zeros({}, at::TensorOptions(dtype).device(seen.device()));
  return at::where(seen, zero, at::full_like(zero, least_of(dtype)));
}

}  // namespace

std::optional<Tensor> make_mask(Attention attention, const TokenPlaces& places, c10::Device device,
                                const MaskOptions& options) {
  const at::NoGradGuard no_grad;
  const bool needs_window = options.window && places.tokens >= *options.window;
  switch (attention) {
    case Attention::kPacked:
      if (!options.gives_starts) return std::nullopt;
      return ops::document_starts(*places.documents).to(device);
    case Attention::kEager:
      return added_mask(seen_tokens(places, device, options.window), options.dtype);
    case Attention::kSdpa:
      break;
  }
  if (is_plain(places, options.padding_may_attend) && !needs_window) return std::nullopt;
  return seen_tokens(places, device, options.window);
}

}  // namespace roundpipe::models
