// Copies between cards, and between a card and the host.
#include <atomic>

#include <ATen/Functions.h>
#include <torch/library.h>

#include "host_memory.h"
#include "kernels.h"
#include "memory.h"

namespace fake_card {
namespace {

// Every value of `src` in `dst`: same sizes. What stands on the card is in `card`'s current stream.
void queue_copy(c10::DeviceIndex card, const at::Tensor& dst, const at::Tensor& src) {
  launch(card, "copy", [dst, src] { const_cast<at::Tensor&>(dst).copy_(src); });
}

// A tensor over host memory that somebody else owns.
at::Tensor borrowed(const at::Tensor& host) {
  if (host.numel() == 0) return host;
  return at::for_blob(host.data_ptr(), host.sizes()).strides(host.strides()).options(host.options()).make_tensor();
}

// Whether the values are still to be conjugated or negated.
bool is_lazy(const at::Tensor& tensor) { return tensor.is_conj() || tensor.is_neg(); }

bool plain_copy(const at::Tensor& dst, const at::Tensor& src) {
  const bool lies_alike = (dst.is_contiguous() && src.is_contiguous()) ||
                          (dst.strides() == src.strides() && dst.is_non_overlapping_and_dense());
  return dst.scalar_type() == src.scalar_type() && dst.sizes() == src.sizes() && lies_alike && !is_lazy(dst) &&
         !is_lazy(src);
}

void copy_on_cards(const at::Tensor& dst, const at::Tensor& src) {
  const c10::DeviceIndex from = src.device().index();
  const c10::DeviceIndex to = dst.device().index();
  if (from == to) return queue_copy(from, alias_tensor(dst), alias_tensor(src));
  // By the source's stream, after what `dst`'s stream has to do before, and before what it has to do next.
  Stream& target = current_stream(to);
  current_stream(from).wait_for(target.mark());
  queue_copy(from, alias_tensor(dst), alias_tensor(src));
  target.wait_for(current_stream(from).mark());
}

void copy_with_host(const at::Tensor& dst, const at::Tensor& src, bool non_blocking) {
  const bool to_card = on_card(dst);
  if (!plain_copy(dst, src)) {
    // Converted on the card where the caller does not wait, else where it comes from, and moved as it lies.
    const at::Tensor plain =
        dst.is_contiguous() && !is_lazy(dst) ? dst : at::empty_like(dst, at::MemoryFormat::Contiguous);
    const at::Tensor same_type = to_card && non_blocking
                                     ? at::empty(src.sizes(), dst.options().dtype(src.scalar_type()))
                                           .copy_(src.resolve_conj().resolve_neg().contiguous(), non_blocking)
                                     : src.to(dst.scalar_type()).resolve_conj().resolve_neg().contiguous();
    if (on_card(same_type) == to_card) {
      plain.copy_(same_type, non_blocking);
    } else {
      copy_with_host(plain, same_type, non_blocking);
    }
    if (!plain.is_same(dst)) dst.copy_(plain, non_blocking);
    return;
  }
  const at::Tensor& host = to_card ? src : dst;
  const c10::DeviceIndex card = (to_card ? dst : src).device().index();
  queue_copy(card, to_card ? alias_tensor(dst) : borrowed(dst), to_card ? borrowed(src) : alias_tensor(src));
  Stream& stream = current_stream(card);
  if (!non_blocking || !is_pinned(host.data_ptr())) {
    if (!to_card) note_host_read();
    return stream.synchronize();
  }
  pinned_allocator()->record_event(
      host.data_ptr(), host.storage().data_ptr().get_context(),
      c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, card), stream.id()));
}

at::Tensor copy_from(const at::Tensor& src, const at::Tensor& dst, bool non_blocking) {
  copy_values(dst, src, non_blocking);
  return dst;
}

at::Tensor copy_from_and_resize(const at::Tensor& src, const at::Tensor& dst) {
  if (dst.sizes() != src.sizes()) dst.resize_(src.sizes());
  copy_values(dst, src, false);
  return dst;
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
}

// Copies see to what is still to be conjugated or negated by themselves.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

std::atomic<int64_t> reads{0};

}  // namespace

int64_t host_reads() { return reads.load(); }
void note_host_read() { ++reads; }

void copy_values(const at::Tensor& dst, const at::Tensor& given, bool non_blocking) {
  if (dst.numel() == 0) return;
  const at::Tensor src = given.sizes() == dst.sizes() ? given : given.expand(dst.sizes());
  const CardGuard guard((on_card(dst) ? dst : src).device().index());
  if (on_card(dst) && on_card(src)) return copy_on_cards(dst, src);
  TORCH_CHECK((on_card(dst) ? src : dst).is_cpu(), "card: copies go to and from the CPU, not ",
              (on_card(dst) ? src : dst).device());
  copy_with_host(dst, src, non_blocking);
}

}  // namespace fake_card
