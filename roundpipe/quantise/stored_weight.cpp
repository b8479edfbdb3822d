#include <roundpipe/quantise/stored_weight.h>

#include <stdexcept>
#include <utility>

#include <ATen/TensorOperators.h>
#include <ATen/ops/isfinite.h>

#include <roundpipe/core/error.h>

namespace roundpipe::quantise {

using at::Tensor;

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
    return read.to(at::kFloat).view(wanted.sizes);
  }
  const Tensor bytes = read.contiguous().view({-1}).view(at::kByte);
  return (stored.has_offset_codes ? bytes.bitwise_xor(128) : bytes).view(wanted.dtype).view(wanted.sizes);
}

}  // namespace roundpipe::quantise
