#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::memory {

// The place of one tensor in a flat block.
struct TensorLayout {
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

// Tensors packed into one flat allocation, each at a multiple of kBlockAlignment_bytes. Dense tensors keep their
// strides, so that kernels take the same path as on the original. Offsets are the same on the host and on every device.
struct BlockLayout {
  std::vector<TensorLayout> tensors;
  int64_t size_bytes = 0;

  // Appends a tensor with the shape of `like`, in `dtype`. Returns its index.
  size_t add(const at::Tensor& like, c10::ScalarType dtype);

  // The same tensors with fp32 in place of 16-bit floating types.
  BlockLayout widened() const;

  // Whether every tensor has the same dtype as in `other`, a layout of the same tensors.
  bool same_dtypes(const BlockLayout& other) const;

  // Returns tensor `index` of a block that starts at `base_bytes` of `flat` (uint8, at least base_bytes + size_bytes
  // long). Shares memory with `flat` and has no autograd history.
  at::Tensor view(const at::Tensor& flat, size_t index, int64_t base_bytes = 0) const;

 private:
  void append(TensorLayout tensor, int64_t elements, c10::ScalarType dtype);
};

}  // namespace roundpipe::memory
