#include <roundpipe/memory/block_layout.h>

#include <algorithm>

#include <ATen/ops/empty.h>

#include <roundpipe/core/bytes.h>

namespace roundpipe::memory {

size_t BlockLayout::add(const at::Tensor& like, c10::ScalarType dtype) {
  TensorLayout tensor;
  tensor.sizes = like.sizes().vec();
  if (like.is_non_overlapping_and_dense()) {
    tensor.strides = like.strides().vec();
  } else {
    tensor.strides.resize(tensor.sizes.size());
    int64_t stride = 1;
    for (size_t dim = tensor.sizes.size(); dim-- > 0;) {
      tensor.strides[dim] = stride;
      stride *= tensor.sizes[dim];
    }
  }
  append(std::move(tensor), like.numel(), dtype);
  return tensors.size() - 1;
}

void BlockLayout::append(TensorLayout tensor, int64_t elements, c10::ScalarType dtype) {
  tensor.dtype = dtype;
  tensor.offset_bytes = size_bytes;
  tensor.size_bytes = elements * static_cast<int64_t>(c10::elementSize(dtype));
  size_bytes = align_up(tensor.offset_bytes + tensor.size_bytes, kBlockAlignment_bytes);
  tensors.push_back(std::move(tensor));
}

BlockLayout BlockLayout::widened() const {
  BlockLayout wide;
  for (const TensorLayout& tensor : tensors) {
    const int64_t elements = tensor.size_bytes / static_cast<int64_t>(c10::elementSize(tensor.dtype));
    const bool narrow = tensor.dtype == c10::ScalarType::BFloat16 || tensor.dtype == c10::ScalarType::Half;
    wide.append(tensor, elements, narrow ? c10::ScalarType::Float : tensor.dtype);
  }
  return wide;
}

bool BlockLayout::same_dtypes(const BlockLayout& other) const {
  return std::equal(tensors.begin(), tensors.end(), other.tensors.begin(), other.tensors.end(),
                    [](const TensorLayout& a, const TensorLayout& b) { return a.dtype == b.dtype; });
}

at::Tensor BlockLayout::view(const at::Tensor& flat, size_t index, int64_t base_bytes) const {
  const TensorLayout& tensor = tensors[index];
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  at::Tensor view = at::empty({0}, flat.options().dtype(tensor.dtype).pinned_memory(false));
  return view.set_(flat.storage(), (flat.storage_offset() + base_bytes + tensor.offset_bytes) / element_bytes,
                   tensor.sizes, tensor.strides);
}

}  // namespace roundpipe::memory
