#include <roundpipe/memory/crossing.h>

#include <cstdint>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>

#include <roundpipe/memory/host_arena.h>

namespace roundpipe::memory {
namespace {

constexpr int64_t kWidestSpan = 2;  // times the values

// Elements from the first to the last one touched. Strides are never negative.
int64_t span(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  return elements;
}

bool keeps_strides(const at::Tensor& narrow) { return span(narrow) <= kWidestSpan * narrow.numel(); }

// Elements to leave in front of a copy, so that it starts at the same place of a cache line. Allocations start at a
// line.
int64_t lead(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  const auto address = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return static_cast<int64_t>(address % kKept_bytes) / tensor.element_size();
}

at::Tensor with_broadcast(const at::Tensor& tensor, const std::vector<int64_t>& expanded_sizes) {
  return expanded_sizes.empty() ? tensor : tensor.expand(expanded_sizes);
}

bool is_lazy(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

}  // namespace

bool has_span(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == c10::kStrided && tensor.has_storage() && !tensor.is_meta() &&
         !tensor.is_nested() && !tensor.is_quantized() && !tensor._is_zerotensor() &&
         !tensor.unsafeGetTensorImpl()->is_python_dispatch();
}

at::Tensor without_broadcast(const at::Tensor& tensor, std::vector<int64_t>& expanded_sizes) {
  at::Tensor narrow = tensor;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    if (tensor.stride(dim) == 0 && tensor.size(dim) > 1) {
      expanded_sizes = tensor.sizes().vec();
      narrow = narrow.narrow(dim, 0, 1);
    }
  }
  return narrow;
}

at::Tensor settled(const at::Tensor& tensor) {
  if (!has_span(tensor)) return tensor;
  std::vector<int64_t> expanded_sizes;
  const at::Tensor narrow = without_broadcast(tensor, expanded_sizes);
  const bool keeps = keeps_strides(narrow);
  if (keeps && !is_lazy(tensor)) return tensor;
  at::Tensor copy = keeps ? empty_alike(narrow, narrow.options())
                          : at::empty_like(narrow, narrow.options(), at::MemoryFormat::Preserve);
  copy.copy_(narrow);
  return with_broadcast(copy, expanded_sizes);
}

at::Tensor settled_gradient(const at::Tensor& gradient) {
  if (!gradient.defined()) return gradient;
  if (gradient._is_zerotensor()) return at::zeros(gradient.sizes(), gradient.options());
  return settled(gradient.layout() == c10::kStrided ? gradient : gradient.to_dense());
}

at::Tensor empty_alike(const at::Tensor& tensor, const at::TensorOptions& options) {
  // Below autograd, so that the result does not count as a view, which may not be written to.
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto with_dtype = options.dtype(tensor.scalar_type());
  const int64_t before = lead(tensor);
  if (before == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), with_dtype);
  return at::empty({before + span(tensor)}, with_dtype).as_strided(tensor.sizes(), tensor.strides(), before);
}

at::Tensor empty_alike(const at::Tensor& tensor, HostArena& arena) {
  static_assert(HostArena::kAlignment_bytes % kKept_bytes == 0);
  const at::AutoDispatchBelowADInplaceOrView below;
  const int64_t before = lead(tensor);
  if (before == 0) return empty_strided(arena, tensor.sizes(), tensor.strides(), tensor.scalar_type());
  return empty_strided(arena, {before + span(tensor)}, {1}, tensor.scalar_type())
      .as_strided(tensor.sizes(), tensor.strides(), before);
}

at::Tensor flat_span(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return tensor.as_strided({span(tensor)}, {1}, tensor.storage_offset());
}

at::Tensor copy_alike(const at::Tensor& tensor, c10::Device device) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!has_span(tensor)) return tensor.clone();
  std::vector<int64_t> expanded_sizes;
  const at::Tensor narrow = without_broadcast(tensor, expanded_sizes);
  const at::Tensor copy = empty_alike(narrow, narrow.options().device(device));
  flat_span(copy).copy_(flat_span(narrow));
  return with_broadcast(copy, expanded_sizes);
}

int64_t settled_bytes(const at::Tensor& tensor) {
  if (!has_span(tensor)) return 0;
  std::vector<int64_t> unused;
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor narrow = without_broadcast(tensor, unused);
  return (keeps_strides(narrow) ? span(narrow) : narrow.numel()) * tensor.element_size();
}

int64_t settled_bytes(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += settled_bytes(tensor);
  return bytes;
}

bool spans_overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!has_span(a) || !has_span(b) || a.numel() == 0 || b.numel() == 0 || !a.is_alias_of(b)) return false;
  const int64_t first_a = a.storage_offset() * a.element_size(), first_b = b.storage_offset() * b.element_size();
  return first_a < first_b + span(b) * b.element_size() && first_b < first_a + span(a) * a.element_size();
}

}  // namespace roundpipe::memory
