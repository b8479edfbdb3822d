#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/quantise/encoded_tensor.h>
#include <roundpipe/quantise/part.h>

namespace roundpipe::quantise {

// A weight that the files of a model hold encoded, as another program has stored it.
class StoredWeight {
 public:
  // What holds a part of it: a tensor of the files, or a value.
  struct StoredPart {
    std::string tensor = {};
    at::Tensor value = {};
    bool has_offset_codes = false;  // of 8 bits without a sign, 128 too large
    int64_t rows_of_scale = 1;      // of a matrix, that share a row of scales; 0: all share one
  };
  // `sizes`: of the codes' numbers. `dtype`: to which its numbers are rounded; none: to any. `parts`: of the format's
  // parts, in their order. `beside`: other tensors of the files that belong to it.
  StoredWeight(Encoding encoding, std::vector<int64_t> sizes, std::optional<c10::ScalarType> dtype,
               std::vector<StoredPart> parts, std::vector<std::string> beside = {});

  // Of the weight.
  const std::vector<int64_t>& sizes() const { return sizes_; }
  const std::vector<StoredPart>& stored_parts() const { return stored_parts_; }
  // The names of all tensors of the files that belong to it.
  std::vector<std::string> tensors() const;
  // What a format's parts of it are, without numbers.
  const std::vector<Part>& parts() const { return parts_; }
  // How its parts become numbers of a dtype. Throws std::invalid_argument, to follow its name, if they are to be
  // rounded to another one.
  Encoding encoding(c10::ScalarType dtype) const;
  // A part. `read`: the tensor that holds it. In the same memory if only the shape differs. Throws
  // std::invalid_argument if it has inf or NaN.
  at::Tensor part(size_t index, const at::Tensor& read) const;

 private:
  Encoding encoding_;
  std::vector<int64_t> sizes_;
  std::optional<c10::ScalarType> dtype_;
  std::vector<StoredPart> stored_parts_;
  std::vector<std::string> beside_;
  std::vector<Part> parts_;
};

// By the weights' names in a model that is not encoded.
using StoredWeights = std::map<std::string, StoredWeight>;

}  // namespace roundpipe::quantise
