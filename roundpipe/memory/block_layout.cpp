#include <roundpipe/memory/block_layout.h>

#include <algorithm>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>

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
  const int64_t offset_bytes = flat.storage_offset() * flat.element_size() + base_bytes + tensor.offset_bytes;
  if (offset_bytes + tensor.size_bytes > static_cast<int64_t>(flat.storage().nbytes())) {
    throw Error(concat("[memory] a block of ", flat.storage().nbytes(), " bytes was given for tensor ", index,
                       ", expected ", offset_bytes + tensor.size_bytes, " bytes; this is a mistake in the engine"));
  }
  // Bypasses the dispatcher: a job whose layer has hundreds of experts makes hundreds of views.
  at::Tensor view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(flat.storage()),
                                                             flat.key_set(), c10::scalarTypeToTypeMeta(tensor.dtype));
  view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes, tensor.strides, offset_bytes / element_bytes);
  return view;
}

}  // namespace roundpipe::memory
