#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace roundpipe::memory {

// Where one tensor lies in a flat block.
struct TensorLayout {
  int64_t offset_bytes = 0;
  int64_t size_bytes = 0;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  c10::ScalarType dtype = c10::ScalarType::Float;
};

// Tensors packed into one flat allocation, each at a multiple of kBlockAlignment_bytes and with its own strides
// where they are dense, so that kernels take the same path as on the original. The same offsets hold on the host and
// on every device.
struct BlockLayout {
  std::vector<TensorLayout> tensors;
  int64_t size_bytes = 0;

  // Appends a tensor of the shape of `like`, in `dtype`; returns its index.
  size_t add(const at::Tensor& like, c10::ScalarType dtype);

  // The same tensors with fp32 in place of 16-bit floating types.
  BlockLayout widened() const;

  // Whether each tensor has the type that it has in `other`, which holds the same ones.
  bool same_dtypes(const BlockLayout& other) const;

  // Tensor `index` inside `flat` (uint8, at least size_bytes + base_bytes long), which starts at `base_bytes`.
  // Shares memory with `flat`; has no autograd history.
  at::Tensor view(const at::Tensor& flat, size_t index, int64_t base_bytes = 0) const;

 private:
  void append(TensorLayout tensor, int64_t elements, c10::ScalarType dtype);
};

}  // namespace roundpipe::memory
