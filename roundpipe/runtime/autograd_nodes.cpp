#include <roundpipe/runtime/autograd_nodes.h>

#include <torch/csrc/autograd/variable.h>

namespace roundpipe::runtime {
namespace {

struct ConsumeHook final : public torch::autograd::PostAccumulateGradHook {
  explicit ConsumeHook(GradientConsumer consumer) : consumer_(std::move(consumer)) {}

  void operator()(const torch::autograd::Variable& leaf) override {
    at::Tensor gradient = std::move(leaf.mutable_grad());
    leaf.mutable_grad().reset();
    consumer_(std::move(gradient));
  }

 private:
  GradientConsumer consumer_;
};

}  // namespace

Boundary::Boundary() {
  auto owner = make_node<BoundaryNode>();
  node_ = static_cast<BoundaryNode*>(owner.get());
  owner_ = std::move(owner);
}

size_t Boundary::attach(at::Tensor& tensor) {
  const size_t index = node_->num_inputs();
  torch::autograd::create_gradient_edge(tensor, owner_);
  return index;
}

at::Tensor Boundary::gradient(size_t index) const {
  return index < node_->gradients.size() ? node_->gradients[index] : at::Tensor();
}

void consume_gradients(const at::Tensor& leaf, GradientConsumer consumer) {
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<ConsumeHook>(std::move(consumer)));
}

}  // namespace roundpipe::runtime
