#include <roundpipe/quantise/stored_weight.h>

#include <stdexcept>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>

#include <roundpipe/core/error.h>

namespace roundpipe::quantise {

using at::Tensor;

namespace {

constexpr int64_t kNanCode = 127;  // of E4M3, with either sign

// A scale for each block of the rows of codes with these sizes.
Tensor spread(const Tensor& scales, int64_t rows_of_scale, at::IntArrayRef codes, int64_t count) {
  if (rows_of_scale == 0) return scales.view({1}).expand({count}).contiguous();
  if (rows_of_scale == 1) return scales;
  const int64_t rows = codes[codes.size() - 2], matrices = c10::multiply_integers(codes.begin(), codes.end() - 2);
  const int64_t in_row = count / (rows * matrices), of_matrix = (rows + rows_of_scale - 1) / rows_of_scale;
  const Tensor all = scales.contiguous().view({matrices, of_matrix, in_row}).repeat_interleave(rows_of_scale, 1);
  return all.slice(1, 0, rows).contiguous();
}

}  // namespace

StoredWeight::StoredWeight(Encoding encoding, std::vector<int64_t> sizes, std::optional<c10::ScalarType> dtype,
                           std::vector<StoredPart> parts, std::vector<std::string> beside)
    : encoding_(encoding),
      sizes_(std::move(sizes)),
      dtype_(dtype),
      stored_parts_(std::move(parts)),
      beside_(std::move(beside)),
      parts_(encoding.format->parts(sizes_)) {
  if (encoding_.transposed) std::swap(sizes_[sizes_.size() - 1], sizes_[sizes_.size() - 2]);
}

std::vector<std::string> StoredWeight::tensors() const {
  std::vector<std::string> names = beside_;
  for (const StoredPart& stored : stored_parts_) {
    if (!stored.tensor.empty()) names.push_back(stored.tensor);
  }
  return names;
}

Encoding StoredWeight::encoding(c10::ScalarType dtype) const {
  if (dtype_ && *dtype_ != dtype) {
    throw std::invalid_argument(concat("decodes to ", *dtype_, " and is to become ", dtype,
                                       ", which would round it twice; expected the dtype ", *dtype_));
  }
  Encoding encoding = encoding_;
  encoding.dtype = dtype;
  return encoding;
}

Tensor StoredWeight::part(size_t index, const Tensor& read) const {
  const Part& wanted = parts_.at(index);
  const StoredPart& stored = stored_parts_.at(index);
  if (stored.value.defined()) return stored.value;
  if (wanted.dtype == at::kFloat) {
    if (!at::isfinite(read).all().item<bool>()) {
      throw std::invalid_argument(
          concat("[quantised folder] ", stored.tensor, " has inf or NaN, expected finite numbers"));
    }
    return spread(read.to(at::kFloat), stored.rows_of_scale, parts_[0].sizes, wanted.sizes[0]).view(wanted.sizes);
  }
  const Tensor bytes = read.contiguous().view({-1}).view(at::kByte);
  if (encoding_.format->has_nan() && index == 0 && bytes.bitwise_and(kNanCode).eq(kNanCode).any().item<bool>()) {
    throw std::invalid_argument(concat("[quantised folder] ", stored.tensor, " has NaN, expected finite numbers"));
  }
  return (stored.has_offset_codes ? bytes.bitwise_xor(128) : bytes).view(wanted.dtype).view(wanted.sizes);
}

}  // namespace roundpipe::quantise
