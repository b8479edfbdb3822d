#include <roundpipe/memory/host_value.h>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>

namespace roundpipe::memory {

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

HostValuePtr make_host_value(const at::Tensor& tensor, bool requires_grad, bool pinned) {
  auto value = std::make_shared<HostValue>();
  const at::Tensor narrow = without_broadcast(tensor, value->expanded_sizes);
  auto options = at::TensorOptions().dtype(narrow.scalar_type()).device(c10::kCPU).pinned_memory(pinned);
  // Kernels choose their way, and so their rounding, by the strides: gaps go, the order of the dimensions stays.
  value->data = at::empty_like(narrow, options, at::MemoryFormat::Preserve);
  value->requires_grad = requires_grad;
  return value;
}

at::Tensor stage_upload(const HostValue& value, c10::Device device, std::vector<device::Piece>& pieces) {
  const auto options = at::TensorOptions().dtype(value.data.scalar_type()).device(device);
  at::Tensor target = at::empty_strided(value.data.sizes(), value.data.strides(), options);
  pieces.push_back({target, value.data});
  return target;
}

at::Tensor restore_broadcast(const HostValue& value, const at::Tensor& uploaded) {
  return value.expanded_sizes.empty() ? uploaded : uploaded.expand(value.expanded_sizes);
}

}  // namespace roundpipe::memory
