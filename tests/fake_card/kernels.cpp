#include "kernels.h"

#include <cstring>

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/CPUAllocator.h>

#include "memory.h"

namespace fake_card {
namespace {

size_t needed_bytes(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  return at::detail::computeStorageNbytes(sizes, strides, tensor.itemsize(),
                                          static_cast<size_t>(tensor.storage_offset()));
}

// A number of Python's counts less than a tensor when types are promoted.
void keep_wrapped_number(const at::Tensor& made, const at::Tensor& from) {
  if (from.dim() > 0) return;
  made.unsafeGetTensorImpl()->set_wrapped_number(from.unsafeGetTensorImpl()->is_wrapped_number());
}

// Warnings of kernels would come from a thread that nobody knows.
class NoWarnings final : public c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

}  // namespace

at::Tensor alias_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  const auto options = at::TensorOptions().dtype(tensor.dtype());
  if (tensor.numel() == 0) return at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), options);
  at::Tensor alias = at::for_blob(alias_of(tensor.const_data_ptr()), tensor.sizes())
                         .strides(tensor.strides())
                         .options(options)
                         .allocator(c10::GetCPUAllocator())
                         .resizeable_storage()
                         .make_tensor();
  keep_wrapped_number(alias, tensor);
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor meta_tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return {};
  at::Tensor meta(at::detail::empty_strided_meta(tensor.sizes(), tensor.strides(), tensor.scalar_type()));
  keep_wrapped_number(meta, tensor);
  return meta;
}

at::Tensor value_of(const at::Tensor& tensor) {
  at::Tensor value = tensor.detach().clone();
  keep_wrapped_number(value, tensor);
  return value;
}

at::Tensor empty_as(const at::Tensor& meta) {
  if (!meta.defined()) return {};
  return at::detail::empty_strided_generic(meta.sizes(), meta.strides(), card_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), meta.scalar_type());
}

void launch(c10::DeviceIndex card, std::string name, std::function<void()> kernel) {
  current_stream(card).add(std::move(name), [kernel = std::move(kernel)] {
    static NoWarnings no_warnings;
    const c10::WarningUtils::WarningHandlerGuard silent(&no_warnings);
    const at::AutoDispatchBelowADInplaceOrView kernels_only;
    kernel();
  });
}

void resize_storage(c10::StorageImpl* storage, size_t size_bytes) {
  const CardGuard guard(storage->device().index());
  c10::DataPtr data = card_allocator()->allocate(size_bytes);
  const size_t kept_bytes = std::min(storage->nbytes(), size_bytes);
  if (kept_bytes > 0) {
    launch(storage->device().index(), "resize of a storage",
           [to = alias_of(data.get()), from = alias_of(storage->data()), kept_bytes] {
             std::memcpy(to, from, kept_bytes);
           });
  }
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(size_bytes);
}

void take_shape(const at::Tensor& tensor, const at::Tensor& meta) {
  const size_t bytes = needed_bytes(tensor, meta.sizes(), meta.strides());
  if (bytes > tensor.storage().nbytes()) resize_storage(tensor.storage().unsafeGetStorageImpl(), bytes);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(meta.sizes(), meta.strides());
}

}  // namespace fake_card
