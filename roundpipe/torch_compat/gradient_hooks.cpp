#include <roundpipe/torch_compat/gradient_hooks.h>

#include <algorithm>

#include <torch/csrc/autograd/variable.h>

namespace roundpipe::torch_compat {

bool has_gradient_hooks(const at::TensorBase& leaf) {
  const torch::autograd::AutogradMeta* const meta = torch::autograd::impl::get_autograd_meta(leaf);
  if (meta == nullptr || meta->cpp_hooks_list_ == nullptr) return false;
  // A hook that was removed leaves an empty function in its place.
  return std::ranges::any_of(*meta->cpp_hooks_list_, [](const auto& hook) { return static_cast<bool>(hook); });
}

}  // namespace roundpipe::torch_compat
