#include <roundpipe/models/masks.h>

#include <algorithm>
#include <limits>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>

namespace roundpipe::models {

using at::Tensor;

namespace {

// Which document of its row each token belongs to [rows, tokens]; undefined if each row is one document.
Tensor documents_of(const TokenPlaces& places) {
  if (!places.positions.defined() || places.attention_mask.defined()) return {};
  const Tensor positions = places.positions.expand({places.rows, places.tokens});
  const Tensor steps = at::diff(positions, 1, -1, positions.slice(1, 0, 1) - 1);
  Tensor documents = steps.ne(1).cumsum(-1);
  return documents.select(1, -1).eq(0).all().item<bool>() ? Tensor() : documents;
}

// Values of [rows, tokens] as those of queries, [rows, 1, tokens, 1], and of keys.
Tensor of_queries(const Tensor& values) { return values.unsqueeze(1).unsqueeze(-1); }
Tensor of_keys(const Tensor& values) { return values.unsqueeze(1).unsqueeze(1); }

// `skips`: none where torch's causal attention does the same.
std::optional<Tensor> sdpa_mask(const TokenPlaces& places, std::optional<int64_t> window, c10::Device device,
                                bool skips) {
  const Tensor documents = documents_of(places);
  const Tensor kept = places.attention_mask.defined() ? places.attention_mask.to(device, at::kBool) : Tensor();
  const bool whole = skips && !documents.defined() && (!kept.defined() || kept.all().item<bool>());
  if (whole && (!window || places.tokens < *window)) return std::nullopt;
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

Tensor added_mask(const TokenPlaces& places, std::optional<int64_t> window, c10::ScalarType dtype, c10::Device device) {
  const Tensor seen = *sdpa_mask(places, window, device, /*skips=*/false);
  const Tensor zero = at::zeros({}, at::TensorOptions(dtype).device(device));
  return at::where(seen, zero, at::full_like(zero, least_of(dtype)));
}

Tensor document_table(const TokenPlaces& places, std::optional<int64_t> window) {
  std::vector<std::vector<int32_t>> lengths;
  const auto tokens = static_cast<int32_t>(places.tokens);
  if (!places.attention_mask.defined()) {
    lengths.assign(static_cast<size_t>(places.rows), {tokens});
  } else {
    const Tensor kept = places.attention_mask.to(at::kCPU, at::kBool).contiguous();
    for (int64_t row = 0; row < places.rows; ++row) {
      const bool* const keeps = kept.const_data_ptr<bool>() + row * places.tokens;
      std::vector<int32_t>& runs = lengths.emplace_back();
      for (int32_t begin = 0; begin < tokens;) {
        const bool* const end = std::find(keeps + begin, keeps + tokens, !keeps[begin]);
        const auto length = static_cast<int32_t>(end - (keeps + begin));
        runs.push_back(keeps[begin] ? length : -length);
        begin += length;
      }
    }
  }
  size_t most = 0;
  for (const auto& row : lengths) most = std::max(most, row.size());
  Tensor table = at::zeros({places.rows, static_cast<int64_t>(most) + 1}, at::kInt);
  for (size_t row = 0; row < lengths.size(); ++row) {
    int32_t* const numbers = table.mutable_data_ptr<int32_t>() + row * (most + 1);
    numbers[0] = static_cast<int32_t>(window.value_or(0));
    std::copy(lengths[row].begin(), lengths[row].end(), numbers + 1);
  }
  return table;
}

}  // namespace

std::optional<Tensor> make_mask(Attention attention, const TokenPlaces& places, std::optional<int64_t> window,
                                c10::ScalarType dtype, c10::Device device) {
  const at::NoGradGuard no_grad;
  switch (attention) {
    case Attention::kPacked:
      return document_table(places, window).to(device);
    case Attention::kEager:
      return added_mask(places, window, dtype, device);
    case Attention::kSdpa:
      break;
  }
  return sdpa_mask(places, window, device, /*skips=*/true);
}

}  // namespace roundpipe::models
