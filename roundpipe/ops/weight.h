#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/quantise/encoded_tensor.h>

namespace roundpipe::ops {

// A weight as a layer has it: a tensor, or a frozen one that is encoded (quantise::EncodedTensor), whose numbers exist
// only while they are used.
class Weight {
 public:
  Weight() : Weight(at::Tensor()) {}
  Weight(at::Tensor plain) : stored_({}, {std::move(plain)}) {}             // NOLINT: a weight is a tensor as a rule
  Weight(quantise::EncodedTensor encoded) : stored_(std::move(encoded)) {}  // NOLINT: likewise

  bool defined() const { return parts().front().defined(); }
  bool is_encoded() const { return encoding().format != nullptr; }
  // The tensor, or those of the encoded form.
  const std::vector<at::Tensor>& parts() const { return stored_.parts(); }

  int64_t size(int64_t dim) const {
    return is_encoded() ? stored_.sizes().at(static_cast<size_t>(dim)) : parts().front().size(dim);
  }
  c10::ScalarType scalar_type() const { return is_encoded() ? encoding().dtype : parts().front().scalar_type(); }
  const quantise::Encoding& encoding() const { return stored_.encoding(); }

  // Of a stack of encoded matrices, these ones. REQUIRES: encoded. Throws std::invalid_argument if a block of the form
  // has numbers of two matrices.
  std::vector<Weight> select(const std::vector<int64_t>& matrices) const {
    std::vector<quantise::EncodedTensor> found = stored_.select(matrices);
    return {found.begin(), found.end()};
  }

  // The tensor itself, or the encoded numbers in new memory and without a gradient.
  at::Tensor values() const { return is_encoded() ? stored_.values() : parts().front(); }

 private:
  quantise::EncodedTensor stored_;  // without a format: the tensor alone
};

}  // namespace roundpipe::ops
