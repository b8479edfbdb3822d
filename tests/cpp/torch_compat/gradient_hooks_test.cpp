#include <roundpipe/torch_compat/gradient_hooks.h>

#include <ATen/Functions.h>
#include <doctest/doctest.h>

namespace roundpipe::torch_compat {

TEST_CASE("gradient hooks: seen until they are removed") {
  const at::Tensor leaf = at::ones({2}).requires_grad_();
  CHECK(!has_gradient_hooks(at::ones({2})));
  CHECK(!has_gradient_hooks(leaf));
  const unsigned first = leaf.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
  const unsigned second = leaf.register_hook([](const at::Tensor&) {});
  leaf.remove_hook(first);
  CHECK(has_gradient_hooks(leaf));
  leaf.remove_hook(second);
  CHECK(!has_gradient_hooks(leaf));
}

}  // namespace roundpipe::torch_compat
