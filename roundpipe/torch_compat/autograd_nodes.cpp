#include <roundpipe/torch_compat/autograd_nodes.h>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/variable.h>

#include <roundpipe/memory/crossing.h>

namespace roundpipe::torch_compat {
namespace {

struct ConsumeHook final : public torch::autograd::PostAccumulateGradHook {
  explicit ConsumeHook(c10::intrusive_ptr<GradientConsumer> given) : consumer(std::move(given)) {}

  void operator()(const torch::autograd::Variable& leaf) override {
    at::Tensor gradient = std::move(leaf.mutable_grad());
    leaf.mutable_grad().reset();
    if (gradient.defined()) consumer->consume(std::move(gradient));  // else its consumer has it already
  }

  const c10::intrusive_ptr<GradientConsumer> consumer;
};

// The node between two layers of one graph.
struct CrossingNode final : public torch::autograd::Node {
  using torch::autograd::Node::Node;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    if (on_arrival) on_arrival();
    at::Tensor gradient = memory::settled_gradient(grads[0]);
    if (holds && !at::GradMode::is_enabled()) *handed_down = gradient;
    return {std::move(gradient)};
  }

  // Held until all gradients of the output are summed. Otherwise, autograd could add into this memory, and the sum
  // would have another layout than with a gradient that came from another stage.
  const std::shared_ptr<at::Tensor> handed_down = std::make_shared<at::Tensor>();
  bool holds = true;
  std::function<void()> on_arrival;
};

// A hook on the node that made the output. Releases the held gradient when the output's gradient is complete.
struct LetGoHook final : public torch::autograd::FunctionPreHook {
  explicit LetGoHook(std::shared_ptr<at::Tensor> held) : held_(std::move(held)) {}

  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    held_->reset();
    return grads;
  }

 private:
  const std::shared_ptr<at::Tensor> held_;
};

void link(at::Tensor& value, const at::Tensor& output, const std::function<void()>& on_arrival) {
  const torch::autograd::Edge edge = torch::autograd::impl::gradient_edge(output);
  NodePtr owner = make_node<CrossingNode>(torch::autograd::edge_list{edge});
  static_cast<CrossingNode&>(*owner).on_arrival = on_arrival;
  // The gradient of a leaf is copied elsewhere, so its layout does not matter.
  if (output.grad_fn()) {
    edge.function->add_pre_hook(std::make_unique<LetGoHook>(static_cast<CrossingNode&>(*owner).handed_down));
  } else {
    static_cast<CrossingNode&>(*owner).holds = false;
  }
  torch::autograd::create_gradient_edge(value, owner);
}

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
  return index < node_->gradients.size() ? memory::settled_gradient(node_->gradients[index]) : at::Tensor();
}

std::vector<at::Tensor> cross_boundary(const std::vector<at::Tensor>& outputs, const std::vector<char>& copied,
                                       const std::function<void()>& on_arrival) {
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> values;
  for (size_t i = 0; i < outputs.size(); ++i) {
    const at::Tensor& output = outputs[i];
    const size_t same = memory::place_of(output, outputs);
    if (same < i || !memory::has_span(output)) {
      values.push_back(same < i ? values[same] : output);
      continue;
    }
    at::Tensor value = memory::settled(output).detach();
    if (!copied.empty() && copied[i] && value.is_alias_of(output)) value = memory::copy_alike(value);
    if (output.requires_grad()) link(value, output, on_arrival);
    values.push_back(std::move(value));
  }
  return values;
}

void consume_gradients(const at::Tensor& leaf, c10::intrusive_ptr<GradientConsumer> consumer) {
  torch::autograd::impl::set_post_acc_grad_hooks(leaf, std::make_unique<ConsumeHook>(std::move(consumer)));
}

c10::intrusive_ptr<GradientConsumer> consumer_of(const at::Tensor& leaf) {
  if (torch::autograd::impl::get_autograd_meta(leaf) == nullptr) return {};
  const auto* const hook = dynamic_cast<const ConsumeHook*>(torch::autograd::impl::post_acc_grad_hooks(leaf).get());
  return hook == nullptr ? c10::intrusive_ptr<GradientConsumer>() : hook->consumer;
}

}  // namespace roundpipe::torch_compat
