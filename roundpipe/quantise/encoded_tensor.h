#pragma once

#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/quantise/format.h>

namespace roundpipe::quantise {

// How a tensor is encoded.
struct Encoding {
  const Format* format = nullptr;
  c10::ScalarType dtype = c10::ScalarType::BFloat16;  // of its numbers: bf16, fp16 or fp32
  bool transposed = false;                            // whether its last two dimensions are exchanged in the parts

  // What holds a tensor of these sizes.
  std::vector<Part> parts(at::IntArrayRef sizes) const;
  // Of tensors with rows of so many numbers, that are stacked or put behind each other: their codes and plain scales
  // are. Throws std::invalid_argument, to follow the name of one, if blocks do not end with rows.
  Encoding of_stack(int64_t numbers) const;
};

// An encoded tensor. It keeps no decoded numbers. Its parts are handles: whoever has them may point them elsewhere.
class EncodedTensor {
 public:
  EncodedTensor(Encoding encoding, std::vector<at::Tensor> parts) : encoding_(encoding), parts_(std::move(parts)) {}

  const Encoding& encoding() const { return encoding_; }
  const std::vector<at::Tensor>& parts() const { return parts_; }
  // Of the tensor.
  std::vector<int64_t> sizes() const;
  // These ones of its first dimension. Throws std::invalid_argument if a block has numbers of two of them.
  std::vector<EncodedTensor> select(const std::vector<int64_t>& indices) const;
  // Its numbers, in new memory, without autograd.
  at::Tensor values() const;

 private:
  Encoding encoding_;
  std::vector<at::Tensor> parts_;
};

}  // namespace roundpipe::quantise
