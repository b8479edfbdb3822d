// Operators that are written for the card: what makes tensors and views, and what torch gives other kinds of devices
// than the CPU by another name.
#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "generator.h"
#include "kernels.h"
#include "memory.h"

namespace fake_card {
namespace {

c10::DeviceIndex index_or_current(std::optional<c10::Device> device) {
  return device && device->has_index() ? device->index() : current_card();
}

at::Tensor empty_on_card(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                         std::optional<bool> pinned, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const CardGuard guard(index_or_current(device));
  return at::detail::empty_generic(sizes, card_allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(type), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> device,
                         std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  const CardGuard guard(index_or_current(device));
  return at::detail::empty_strided_generic(sizes, strides, card_allocator(),
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(type));
}

at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
                      std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  const CardGuard guard(self.device().index());
  take_shape(self, at::empty(sizes, self.options().device(c10::kMeta).memory_format(format)));
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef sizes,
                        at::IntArrayRef strides) {
  at::TensorImpl* const tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset);
  if (strides.data() == nullptr) {
    tensor->set_sizes_contiguous(sizes);
  } else {
    tensor->set_sizes_and_strides(sizes, strides);
  }
  TORCH_CHECK(
      self.numel() == 0 || at::detail::computeStorageNbytes(self.sizes(), self.strides(), self.itemsize(),
                                                            static_cast<size_t>(offset)) <= self.storage().nbytes(),
      "card: the tensor would reach beyond its storage");
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const int64_t count = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_nothing(at::Tensor& self) {
  const CardGuard guard(self.device().index());
  return set_whole_storage(self, empty_on_card({0}, self.scalar_type(), {}, self.device(), {}, {}).storage());
}

at::Scalar local_scalar(const at::Tensor& self) {
  note_host_read();
  current_stream(self.device().index()).synchronize();
  return alias_tensor(self).item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  card_allocator()->recordStream(self.storage().data_ptr(), stream);
}

bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().is_alias_of(other.storage()) && self.storage_offset() == other.storage_offset() &&
         self.sizes() == other.sizes() && self.strides() == other.strides();
}

// As on real cards, it takes no generator and draws from the default one.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  const c10::DeviceIndex card = input.device().index();
  const CardGuard guard(card);
  at::Tensor mask = at::empty_like(input, input.options().dtype(at::kBool));
  if (!train.value_or(true) || p == 0) return {input.clone(), mask.fill_(true)};
  const at::Tensor output = at::empty_like(input);
  launch(card, "native_dropout",
         [p, from = alias_tensor(input), to = alias_tensor(output), kept = alias_tensor(mask),
          generator = take_from({}, card)] {
           const double keep = 1 - p;
           const_cast<at::Tensor&>(kept).bernoulli_(keep, generator);
           const_cast<at::Tensor&>(to).copy_(from.mul(kept).mul(keep == 0 ? 0 : 1 / keep));
         });
  return {output, mask};
}

at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  const c10::DeviceIndex card = input.device().index();
  const CardGuard guard(card);
  const at::Tensor shift = bias.value_or(at::Tensor());
  const at::Tensor output = empty_as(at::convolution(meta_tensor(input), meta_tensor(weight), meta_tensor(shift),
                                                     stride, padding, dilation, transposed, output_padding, groups));
  launch(card, "convolution",
         [to = alias_tensor(output), from = alias_tensor(input), by = alias_tensor(weight), shift = alias_tensor(shift),
          stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(), transposed,
          output_padding = output_padding.vec(), groups] {
           const_cast<at::Tensor&>(to).copy_(
               at::convolution(from, by, shift, stride, padding, dilation, transposed, output_padding, groups));
         });
  return output;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& gradient, const at::Tensor& input,
                                                                    const at::Tensor& weight, at::IntArrayRef stride,
                                                                    at::IntArrayRef padding, at::IntArrayRef dilation,
                                                                    bool transposed, at::IntArrayRef output_padding,
                                                                    int64_t groups, std::array<bool, 3> wanted) {
  const c10::DeviceIndex card = input.device().index();
  const CardGuard guard(card);
  const int64_t channels = gradient.size(1);
  const at::Tensor of_input = wanted[0] ? at::empty_like(input) : at::Tensor();
  const at::Tensor of_weight = wanted[1] ? at::empty_like(weight) : at::Tensor();
  const at::Tensor of_bias = wanted[2] ? at::empty({channels}, weight.options()) : at::Tensor();
  launch(card, "convolution_backward",
         [to = std::array{alias_tensor(of_input), alias_tensor(of_weight), alias_tensor(of_bias)},
          gradient = alias_tensor(gradient), input = alias_tensor(input), weight = alias_tensor(weight),
          stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(), transposed,
          output_padding = output_padding.vec(), groups, wanted, channels] {
           const auto [first, second, third] =
               at::convolution_backward(gradient, input, weight, at::IntArrayRef{channels}, stride, padding, dilation,
                                        transposed, output_padding, groups, wanted);
           const std::array from{first, second, third};
           for (size_t i = 0; i < to.size(); ++i) {
             if (to[i].defined()) const_cast<at::Tensor&>(to[i]).copy_(from[i]);
           }
         });
  return {of_input, of_weight, of_bias};
}

// As on real cards, integers too.
at::Tensor histc(const at::Tensor& input, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  const c10::DeviceIndex card = input.device().index();
  const CardGuard guard(card);
  const at::Tensor output = at::empty({bins}, input.options());
  launch(card, "histc", [to = alias_tensor(output), from = alias_tensor(input), bins, min, max] {
    const at::Tensor values = from.is_floating_point() ? from : from.to(at::kDouble);
    const_cast<at::Tensor&>(to).copy_(values.histc(bins, min, max));
  });
  return output;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty_on_card);
  library.impl("empty_strided", empty_strided);
  library.impl("as_strided", as_strided);
  library.impl("view", at::native::view);
  library.impl("_reshape_alias", at::native::_reshape_alias);
  library.impl("unfold", at::native::unfold);
  library.impl("view_as_real", at::native::view_as_real);
  library.impl("view_as_complex", at::native::view_as_complex);
  library.impl("resize_", resize);
  library.impl("set_.source_Storage_storage_offset", set_storage);
  library.impl("set_.source_Storage", set_whole_storage);
  library.impl("set_.source_Tensor", at::native::set_tensor_);
  library.impl("set_", set_nothing);
  library.impl("is_set_to", is_set_to);
  library.impl("_local_scalar_dense", local_scalar);
  library.impl("record_stream", record_stream);
  library.impl("native_dropout", native_dropout);
  library.impl("histc", histc);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}

}  // namespace
}  // namespace fake_card
