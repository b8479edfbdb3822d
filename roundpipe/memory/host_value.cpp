#include <roundpipe/memory/host_value.h>

#include <ATen/core/LegacyTypeDispatch.h>

#include <roundpipe/memory/host_arena.h>

namespace roundpipe::memory {

HostValuePtr stage_download(const at::Tensor& tensor, bool requires_grad, bool pinned,
                            std::vector<device::Piece>& pieces) {
  auto value = std::make_shared<HostValue>();
  const at::Tensor narrow = without_broadcast(tensor, value->expanded_sizes);
  value->data = empty_alike(narrow, HostArena::values(pinned));
  value->requires_grad = requires_grad;
  pieces.push_back({flat_span(value->data), flat_span(narrow)});
  return value;
}

HostValuePtr copy_to_host(const at::Tensor& tensor, bool requires_grad, bool pinned) {
  auto value = std::make_shared<HostValue>();
  const at::Tensor narrow = without_broadcast(settled(tensor), value->expanded_sizes);
  value->data = empty_alike(narrow, HostArena::values(pinned));
  value->requires_grad = requires_grad;
  const at::Tensor all = flat_span(value->data);
  if (all.numel() > narrow.numel()) all.zero_();
  value->data.copy_(narrow);
  return value;
}

HostValuePtr refer_to_host(const at::Tensor& tensor, bool requires_grad) {
  auto value = std::make_shared<HostValue>();
  value->data = without_broadcast(settled(tensor), value->expanded_sizes);
  value->requires_grad = requires_grad;
  if (flat_span(value->data).numel() > value->data.numel()) return copy_to_host(tensor, requires_grad, false);
  return value;
}

at::Tensor staged_for(const at::Tensor& target, const at::Tensor& tensor, bool pinned) {
  if (!pinned) return tensor;
  at::Tensor staged = empty_strided(HostArena::values(pinned), target.sizes(), target.strides(), target.scalar_type());
  return staged.copy_(tensor);
}

at::Tensor stage_upload(const HostValue& value, c10::Device device, std::vector<device::Piece>& pieces) {
  at::Tensor target = empty_alike(value.data, at::TensorOptions().device(device));
  pieces.push_back({flat_span(target), flat_span(value.data)});
  return target;
}

at::Tensor restore_broadcast(const HostValue& value, const at::Tensor& uploaded) {
  return value.expanded_sizes.empty() ? uploaded : uploaded.expand(value.expanded_sizes);
}

}  // namespace roundpipe::memory
