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

namespace roundpipe::torch_compat {

// torch moved its nodes from shared_ptr to intrusive_ptr between 2.11 and 2.13; this is whichever it has.
using NodePtr = decltype(torch::autograd::Edge::function);

template <typename NodeType, typename... Args>
NodePtr make_node(Args&&... args) {
  if constexpr (std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>) {
    return std::make_shared<NodeType>(std::forward<Args>(args)...);
  } else {
    return NodePtr(c10::make_intrusive<NodeType>(std::forward<Args>(args)...));
  }
}

// Stands where a segment's inputs come from: keeps the gradients that arrive there. Unlike a leaf, a tensor with this
// history may be changed in place by the layer, as it could in an uncut model.
struct BoundaryNode : public torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    gradients = std::move(grads);
    return {};
  }
  torch::autograd::variable_list gradients;  // one per attached tensor, undefined where none arrived
};

// A boundary and the tensors that have it as history.
class Boundary {
 public:
  Boundary();
  // `tensor` (no history, own memory) gets this boundary as its source. Returns its place in gradients().
  size_t attach(at::Tensor& tensor);
  // After the backward, settled (see memory/crossing.h). REQUIRES: index < number of attached tensors.
  at::Tensor gradient(size_t index) const;

 private:
  BoundaryNode* node_;
  NodePtr owner_;
};

// What the next layer of the same graph is given for the outputs of a layer: values that share their memory where they
// may stay as they are (see memory/crossing.h), and copies where not or where `copied` says so (by place; empty: none).
// The same tensor twice stays the same tensor. Each has a history of its own, so a layer may change it in place, and
// hands its gradient down settled. As at the end of a stage, gradients of other uses of the output are never added into
// the memory of the one that has come from above. `on_arrival`, if any, runs for each gradient that comes down, before
// any of the backward of what made the outputs.
std::vector<at::Tensor> cross_boundary(const std::vector<at::Tensor>& outputs, const std::vector<char>& copied = {},
                                       const std::function<void()>& on_arrival = nullptr);

// Takes each parameter's gradient out of `.grad` the moment a backward pass has completed it, so a stage never holds
// two copies of its gradients. Runs on the autograd thread of the device.
using GradientConsumer = std::function<void(at::Tensor gradient)>;
void consume_gradients(const at::Tensor& leaf, GradientConsumer consumer);

}  // namespace roundpipe::torch_compat
