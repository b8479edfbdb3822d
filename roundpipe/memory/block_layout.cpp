#include <roundpipe/memory/block_layout.h>

#include <sys/mman.h>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

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

at::Tensor BlockLayout::view(const at::Tensor& flat, size_t index, int64_t base_bytes) const {
  const TensorLayout& tensor = tensors[index];
  const auto element_bytes = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  at::Tensor view = at::empty({0}, flat.options().dtype(tensor.dtype).pinned_memory(false));
  return view.set_(flat.storage(), (flat.storage_offset() + base_bytes + tensor.offset_bytes) / element_bytes,
                   tensor.sizes, tensor.strides);
}

namespace {

// A mapping of its own, so that the system has the memory back as soon as the last tensor in it is gone.
at::Tensor map_host(int64_t size_bytes) {
  const auto length = static_cast<size_t>(size_bytes);
  void* const data = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) return {};
  return at::from_blob(
      data, {size_bytes}, [length](void* memory) { munmap(memory, length); }, at::TensorOptions().dtype(at::kByte));
}

}  // namespace

at::Tensor allocate_host(int64_t size_bytes, bool pinned) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  if (!pinned) {
    constexpr int64_t kMapped_bytes = 1 << 20;
    const at::Tensor mapped = size_bytes >= kMapped_bytes ? map_host(size_bytes) : at::Tensor();
    return mapped.defined() ? mapped : at::empty({size_bytes}, options);
  }
  try {
    return at::empty({size_bytes}, options.pinned_memory(true));
  } catch (const c10::Error& error) {
    TORCH_WARN_ONCE("[memory] could not page-lock ", format_bytes(size_bytes), " (", error.what_without_backtrace(),
                    "); going on with pageable memory, transfers will be slower");
    return at::empty({size_bytes}, options);
  }
}

}  // namespace roundpipe::memory
