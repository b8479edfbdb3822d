#pragma once

#include <functional>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/edge.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/custom_class.h>

namespace roundpipe::torch_compat {

// The pointer type of torch's nodes: shared_ptr, or intrusive_ptr since a change between torch 2.11 and 2.13.
using NodePtr = decltype(torch::autograd::Edge::function);

template <typename NodeType, typename... Args>
NodePtr make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<NodeType>(std::forward<Args>(args)...);
  } else {
    return NodePtr(c10::make_intrusive<NodeType>(std::forward<Args>(args)...));
  }
}

// The source of a segment's inputs, which keeps the gradients that arrive there. A layer may change a tensor with this
// history in place, as it could in an uncut model; a leaf would forbid that.
struct BoundaryNode : public torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    gradients = std::move(grads);
    return {};
  }
  torch::autograd::variable_list gradients;  // one per attached tensor; undefined if none arrived
};

// A boundary that tensors have as their history.
class Boundary {
 public:
  Boundary();
  // Makes this boundary the source of `tensor` and returns the index for gradient(). REQUIRES: `tensor` has its own
  // memory and no history.
  size_t attach(at::Tensor& tensor);
  // The gradient that arrived in the backward, settled (see memory/crossing.h); undefined if none did.
  // REQUIRES: index < number of attached tensors.
  at::Tensor gradient(size_t index) const;

 private:
  BoundaryNode* node_;
  NodePtr owner_;
};

// Turns the outputs of a layer into the inputs of the next layer of the same graph. An input shares the output's memory
// if the layout may stay (see memory/crossing.h) and `copied` does not ask for a copy (by index; empty: none);
// otherwise it is a copy. If one tensor appears twice, its inputs are one tensor too. Each input has its own history,
// so a layer may change it in place, and passes its gradient down settled. As at the end of a stage, gradients of other
// uses of the output are never added into the memory of the gradient that came from above. `on_arrival`, if set, runs
// for each gradient that comes down, before the backward of the layer that made the outputs.
std::vector<at::Tensor> cross_boundary(const std::vector<at::Tensor>& outputs, const std::vector<char>& copied = {},
                                       const std::function<void()>& on_arrival = nullptr);

// Takes the gradients of a leaf, on the autograd thread of its device. Nodes hold it.
class GradientConsumer : public torch::CustomClassHolder {
 public:
  // The finished gradient of a backward pass: once in each.
  virtual void consume(at::Tensor gradient) = 0;
  // For a node that makes the leaf's gradient, or a part of it: takes it as a product of two matrices, or in another
  // dtype than the leaf's, so that it is not rounded before it is summed. The node then passes on no gradient. Called
  // as each node runs, so several times in a pass in which several do, and beside consume(). A pass that asks for the
  // leaf's gradient (torch::autograd::grad) gets none: only for nodes that such a pass never meets. Returns false for
  // what has to come as a gradient.
  virtual bool add_product(const at::Tensor& /*left*/, const at::Tensor& /*right*/) { return false; }
  virtual bool add_wide(const at::Tensor& /*gradient*/) { return false; }
};

// Moves the gradient of `leaf` out of `.grad` to `consumer` as soon as a backward pass has completed it, so that a
// stage never holds two copies of its gradients.
void consume_gradients(const at::Tensor& leaf, c10::intrusive_ptr<GradientConsumer> consumer);
// The leaf's consumer; null if it has none.
c10::intrusive_ptr<GradientConsumer> consumer_of(const at::Tensor& leaf);

}  // namespace roundpipe::torch_compat
