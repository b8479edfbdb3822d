#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/quantise/encoded_tensor.h>

namespace roundpipe::ops {

// A weight as a layer has it: a tensor, or a frozen one that is encoded (quantise::EncodedTensor), whose numbers exist
// only while they are used.
class Weight {
 public:
  Weight() = default;
  Weight(at::Tensor plain) : parts_{std::move(plain)} {}  // NOLINT: a weight is a tensor as a rule
  Weight(quantise::EncodedTensor encoded)
      : encoding_(encoded.encoding()), parts_(encoded.parts()) {}  // NOLINT: likewise

  bool defined() const { return !parts_.empty() && parts_.front().defined(); }
  bool is_encoded() const { return encoding_.format != nullptr; }
  // The tensor, or those of the encoded form.
  const std::vector<at::Tensor>& parts() const { return parts_; }

  std::vector<int64_t> sizes() const { return is_encoded() ? encoded().sizes() : parts_.at(0).sizes().vec(); }
  int64_t size(int64_t dim) const { return sizes().at(static_cast<size_t>(dim)); }
  c10::ScalarType scalar_type() const { return is_encoded() ? encoding_.dtype : parts_.at(0).scalar_type(); }
  bool requires_grad() const { return !is_encoded() && parts_.at(0).requires_grad(); }
  const quantise::Encoding& encoding() const { return encoding_; }

  // Of a stack of encoded matrices, these ones. REQUIRES: encoded. Throws std::invalid_argument if a block of the form
  // has numbers of two matrices.
  std::vector<Weight> select(const std::vector<int64_t>& matrices) const {
    std::vector<Weight> found;
    for (quantise::EncodedTensor& each : encoded().select(matrices)) found.emplace_back(std::move(each));
    return found;
  }

  // The tensor itself, or the encoded numbers in new memory and without a gradient.
  at::Tensor values() const { return is_encoded() ? encoded().values() : parts_.at(0); }

 private:
  quantise::EncodedTensor encoded() const { return {encoding_, parts_}; }

  quantise::Encoding encoding_;    // without a format: not encoded
  std::vector<at::Tensor> parts_;  // the tensor alone, or those of the encoded form
};

}  // namespace roundpipe::ops
