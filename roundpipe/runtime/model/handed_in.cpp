#include <roundpipe/runtime/model/handed_in.h>

#include <map>
#include <utility>

#include <ATen/core/grad_mode.h>

#include <roundpipe/memory/crossing.h>
#include <roundpipe/memory/host_value.h>

namespace roundpipe::runtime {
namespace {

// One of the caller's tensors as devices will see it: a copy, since the caller may change it before they have read it.
at::Tensor taken_over(const at::Tensor& tensor, bool pinned) {
  const at::NoGradGuard no_grad;
  const memory::HostValuePtr value = memory::copy_to_host(tensor.detach(), /*requires_grad=*/false, pinned);
  return memory::restore_broadcast(*value, value->data);
}

}  // namespace

std::vector<Values> taken_over(std::vector<Values> labels, bool pinned) {
  std::map<at::TensorImpl*, std::pair<at::Tensor, at::Tensor>> copies;  // originals, kept alive, and copies
  for (Values& values : labels) {
    for (at::Tensor& tensor : values.tensors) {
      auto& [original, copy] = copies[tensor.unsafeGetTensorImpl()];
      if (!copy.defined()) copy = taken_over(original = tensor, pinned);
      tensor = copy;
    }
  }
  return labels;
}

at::Tensor taken_over_gradient(const at::Tensor& gradient, bool pinned) {
  const at::NoGradGuard no_grad;
  const bool alone = gradient.use_count() == 1 && gradient.has_storage() && gradient.storage().use_count() == 1;
  const at::Tensor settled = memory::settled_gradient(gradient.detach().to(c10::kCPU));
  if (!alone && settled.is_alias_of(gradient)) return taken_over(settled, pinned);
  const memory::HostValuePtr value = memory::refer_to_host(settled, /*requires_grad=*/false);
  return memory::restore_broadcast(*value, value->data);
}

}  // namespace roundpipe::runtime
