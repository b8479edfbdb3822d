#include <roundpipe/runtime/pipeline_node.h>

#include <algorithm>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <roundpipe/core/error.h>
#include <roundpipe/runtime/model/out_of_memory.h>
#include <roundpipe/torch_compat/autograd_nodes.h>

namespace roundpipe::runtime {
namespace {

// Whether the backward under way was not asked for the gradients of all leaves.
bool asks_for_some() {
  const auto* asked = torch::autograd::get_current_graph_task_exec_info();
  return asked != nullptr && !asked->empty();
}

bool trains(const Call& call) {
  return std::any_of(call.trainable.begin(), call.trainable.end(), [](const std::vector<char>& of_layer) {
    return std::find(of_layer.begin(), of_layer.end(), 1) != of_layer.end();
  });
}

struct PipelineNode final : public torch::autograd::Node {
  using torch::autograd::Node::Node;

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    if (!call) {
      throw Error(
          "[backward] the backward of this graph has already run and has freed its activations; pass "
          "retain_graph to the first backward");
    }
    if (at::GradMode::is_enabled()) {
      throw Error(
          "[backward] gradients of gradients do not go through the pipeline; call backward without "
          "create_graph");
    }
    if (asks_for_some() && trains(*call)) {
      throw Error(
          "[backward] torch.autograd.grad and backward(inputs=...) ask for some gradients only, and the pipeline sums "
          "those of all parameters that require grad; call loss.backward() and read .grad, or freeze the parameters "
          "before the call (model.requires_grad_(False)) for the gradients of its inputs alone");
    }
    std::vector<std::vector<at::Tensor>> per_microbatch(output_counts.size());
    for (size_t m = 0; m < output_counts.size(); ++m) per_microbatch[m].resize(output_counts[m]);
    for (size_t i = 0; i < gradients.size(); ++i) {
      const auto [microbatch, position] = places[i];
      per_microbatch[microbatch][position] = std::move(gradients[i]);
    }
    // Runs after every model of the graph has its backward submitted: as in PyTorch, the backward is over when
    // backward() returns, and errors of the recompute are thrown there.
    torch::autograd::Engine::get_default_engine().queue_callback(
        [runner = runner, call = call] { with_raised_errors([&] { runner->finish_backward(call); }); });
    const bool keep_graph = torch::autograd::get_current_graph_task_keep_graph();
    std::vector<std::vector<at::Tensor>> input_gradients;
    with_raised_errors([&] { input_gradients = runner->backward(call, plan, std::move(per_microbatch), keep_graph); });
    torch::autograd::variable_list result;
    for (const std::vector<at::Tensor>& microbatch : input_gradients) {
      result.insert(result.end(), microbatch.begin(), microbatch.end());
    }
    result.resize(num_outputs());
    return result;
  }

  void release_variables() override { call.reset(); }

  std::shared_ptr<BackwardRunner> runner;  // the outputs may outlive the user's model
  CallPtr call;
  schedule::Plan plan;
  std::vector<size_t> output_counts;              // per microbatch
  std::vector<std::pair<size_t, size_t>> places;  // node input -> microbatch, position
};

}  // namespace

void attach_graph(std::shared_ptr<BackwardRunner> runner, const CallPtr& call, const schedule::Plan& plan,
                  const std::vector<Values>& inputs, std::vector<Values>& outputs) {
  torch::autograd::edge_list sources;
  for (const Values& values : inputs) {
    for (const at::Tensor& tensor : values.tensors) {
      sources.push_back(tensor.requires_grad() ? torch::autograd::impl::gradient_edge(tensor)
                                               : torch::autograd::Edge());
    }
  }
  torch_compat::NodePtr owner = torch_compat::make_node<PipelineNode>(std::move(sources));
  auto& node = static_cast<PipelineNode&>(*owner);
  node.runner = std::move(runner);
  node.call = call;
  node.plan = plan;
  for (size_t m = 0; m < outputs.size(); ++m) {
    node.output_counts.push_back(outputs[m].tensors.size());
    const BoundaryValues& boundary = call->values(plan.layers, static_cast<int>(m));
    for (size_t i = 0; i < outputs[m].tensors.size(); ++i) {
      if (!boundary.tensors[i]->requires_grad) continue;
      node.places.emplace_back(m, i);
      torch::autograd::create_gradient_edge(outputs[m].tensors[i], owner);
    }
  }
}

}  // namespace roundpipe::runtime
