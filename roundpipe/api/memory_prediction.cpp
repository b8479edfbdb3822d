#include <roundpipe/api/memory_prediction.h>

#include <algorithm>
#include <optional>
#include <span>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/error.h>
#include <roundpipe/device/virtual/memory_meter.h>
#include <roundpipe/memory/crossing.h>
#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/runtime/model/layer_sizes.h>
#include <roundpipe/runtime/model/parameter_watch.h>
#include <roundpipe/runtime/model/random.h>
#include <roundpipe/runtime/step_memory.h>
#include <roundpipe/torch_compat/autograd_nodes.h>

namespace roundpipe {

using runtime::Engine;
using runtime::Values;
using simulate::LayerFootprint;

namespace {

// What this thread holds of a device's memory: of the host's that stands for a virtual device, or of a card.
class Meter {
 public:
  explicit Meter(device::Device& device) : device_(device) {
    if (device.is_virtual()) host_.emplace().enter();
  }
  int64_t current_bytes() const { return host_ ? host_->current_bytes() : device_.memory().current_bytes; }
  int64_t peak_bytes() const { return host_ ? host_->peak_bytes() : device_.memory().peak_bytes; }
  void reset_peak() {
    if (host_)
      host_->reset_peak();
    else
      device_.reset_peak_memory();
  }

 private:
  device::Device& device_;
  std::optional<device::MemoryMeter> host_;  // ends its count when it goes
};

int64_t bytes_of(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += memory::settled_bytes(tensor);
  return bytes;
}

// Copies on `device`, as they are beyond a boundary.
std::vector<at::Tensor> crossed(const std::vector<at::Tensor>& tensors, c10::Device device) {
  std::vector<at::Tensor> copies;
  for (const at::Tensor& tensor : tensors) {
    const at::NoGradGuard no_grad;
    copies.push_back(memory::copy_alike(memory::settled(tensor.detach()), device));
    copies.back().set_requires_grad(tensor.requires_grad());
  }
  return copies;
}

struct Dropping final : torch_compat::GradientConsumer {
  void consume(at::Tensor /*gradient*/) override {}
};

std::unique_ptr<runtime::LayerShell> filled_shell(const runtime::LayerState& state, c10::Device device) {
  runtime::Layer& layer = *state.layer;
  const std::shared_ptr<const void> attributes = layer.attributes();
  std::unique_ptr<runtime::LayerShell> shell = layer.make_shell(device);
  shell->refresh(attributes);
  const at::NoGradGuard no_grad;
  const std::vector<memory::NamedTensor> parameters = layer.parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor& own = shell->parameters[i];
    own.set_data(parameters[i].tensor.detach().to(device, parameters[i].tensor.scalar_type(), /*non_blocking=*/false,
                                                  /*copy=*/true));
    // As in the engine, which sums a gradient elsewhere as soon as it is complete.
    torch_compat::consume_gradients(own, c10::make_intrusive<Dropping>());
    own.set_requires_grad(parameters[i].tensor.requires_grad());
  }
  for (size_t i = 0; i < state.buffers.size(); ++i)
    shell->buffers[i].set_data(state.buffers[i].tensor.detach().to(device).clone());
  return shell;
}

// Runs one layer and, if there is one, the loss. `values`: the inputs on the host, replaced by the outputs.
LayerFootprint measure_layer(const runtime::LayerState& state, int index, Values& values, const Values& label,
                             const LossFunction* loss, device::Device& on) {
  const c10::Device device = on.torch_device();
  Meter meter(on);
  LayerFootprint footprint;
  footprint.inputs = bytes_of(values.tensors);
  const std::unique_ptr<runtime::LayerShell> shell = filled_shell(state, device);
  const std::vector<at::Tensor> leaves = crossed(values.tensors, device);
  // A layer may write to its inputs in place, which autograd forbids for leaves.
  Values inputs{torch_compat::cross_boundary(leaves), values.structure};
  runtime::ParameterWatch watch(shell->parameters, std::vector<char>(shell->parameters.size(), 1));
  const int64_t base = meter.current_bytes();
  meter.reset_peak();
  runtime::LayerContext context;
  context.layer = index;
  context.queue = &on.compute();
  Values outputs = shell->forward(inputs, context);
  for (const at::Tensor& output : outputs.tensors) {
    if (memory::place_of(output, inputs.tensors) == inputs.tensors.size())
      footprint.outputs += memory::settled_bytes(output);
  }
  outputs.tensors = torch_compat::cross_boundary(outputs.tensors);
  std::vector<at::Tensor> roots = loss != nullptr ? (*loss)(outputs, label) : outputs.tensors;
  std::erase_if(roots, [](const at::Tensor& root) { return !root.requires_grad(); });
  footprint.forward = meter.peak_bytes() - base;
  footprint.saved = meter.current_bytes() - base;
  std::vector<std::string> names;
  for (const memory::NamedTensor& parameter : state.layer->parameters()) names.push_back(parameter.name);
  watch.require_kept(concat("layer ", index, " (", state.layer->name(), ")"), names);
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& root : roots) {
    gradients.push_back(at::ones_like(root));
    footprint.output_gradients += static_cast<int64_t>(gradients.back().nbytes());
  }
  Values handed_on{crossed(outputs.tensors, c10::kCPU), outputs.structure};
  const int64_t held = meter.current_bytes();
  outputs.tensors.clear();
  meter.reset_peak();
  if (!roots.empty()) torch::autograd::backward(roots, gradients);
  footprint.backward = std::max(footprint.saved, footprint.saved + meter.peak_bytes() - held);
  values = std::move(handed_on);
  return footprint;
}

simulate::HostMemory host_of(const runtime::ModelState& model, const runtime::ModelOptimizer* optimizer) {
  std::vector<std::vector<simulate::ParameterSize>> blocks;
  for (const runtime::BlockState& block : model.blocks) {
    blocks.emplace_back();
    for (const memory::NamedTensor& parameter : block.block->parameters()) {
      const at::Tensor& tensor = parameter.tensor;
      const auto master = optim::remainder_dtype(tensor.scalar_type());
      blocks.back().push_back({.elements = tensor.numel(),
                               .element_bytes = static_cast<int64_t>(tensor.element_size()),
                               .master_bytes = master ? static_cast<int64_t>(c10::elementSize(*master)) : 0,
                               .moment_bytes = optim::state_bytes(optim::Algorithm::kAdam, {},
                                                                  optim::MomentFormat::kFloat32, tensor.sizes()),
                               .trained = tensor.requires_grad(),
                               .tied = block.tied()});
    }
  }
  simulate::HostMemory host = simulate::predict_host(blocks);
  if (optimizer == nullptr) return host;
  const runtime::ModelOptimizer::HostBytes bytes = optimizer->host_bytes();
  host.masters = bytes.remainders;
  host.moments = bytes.moments;
  for (const runtime::BlockState& block : model.blocks) {
    // Gradients in fp32 cannot become the memory of the next weights.
    if (block.trainable() && block.gradient_buffers != block.block->buffers())
      host.gradients += block.gradient_layout.size_bytes;
  }
  return host;
}

}  // namespace

std::vector<LayerFootprint> measure_layers(const runtime::ModelState& model, const StepShape& shape,
                                           const LossFunction* loss, device::Device& device) {
  const runtime::DrawsApart draws(torch_compat::kUnseeded, device.torch_device());
  const at::AutoGradMode grad_mode(true);
  Values values = shape.batch;
  Values label{crossed(shape.label.tensors, device.torch_device()), shape.label.structure};
  std::vector<LayerFootprint> footprints;
  for (int l = 0; l < model.layer_count(); ++l) {
    const bool last = l + 1 == model.layer_count();
    footprints.push_back(
        measure_layer(*model.layers[static_cast<size_t>(l)], l, values, label, last ? loss : nullptr, device));
  }
  return footprints;
}

simulate::StepSizes step_sizes(const runtime::ModelState& model, const StepShape& shape, const RunOptions& options,
                               std::vector<LayerFootprint> footprints) {
  simulate::StepSizes sizes;
  sizes.layers = runtime::layer_sizes(model);
  sizes.footprints = std::move(footprints);
  sizes.grain = options.recompute_grain;
  sizes.label_bytes = bytes_of(shape.label.tensors);
  sizes.gradient_groups = options.gradient_groups;
  return sizes;
}

MemoryPrediction predict_step(runtime::Pipeline& pipeline, const StepShape& shape, const LossFunction& loss,
                              const RunOptions& options, const runtime::ModelOptimizer* optimizer) {
  const std::shared_ptr<Engine> engine = Engine::current();
  const runtime::ModelState& model = pipeline.model();
  simulate::StepSizes sizes =
      step_sizes(model, shape, options, measure_layers(model, shape, &loss, engine->worker(0).device()));
  runtime::PlanRequest request{schedule::PlanMode::kFused, shape.microbatches, options.gradient_groups,
                               options.recompute_grain};
  const runtime::PlannedMemory planned = runtime::plan_within_caps(pipeline, options.route, request, sizes);
  request.recompute_grain = planned.grain;
  MemoryPrediction prediction;
  prediction.device = planned.device;
  prediction.host = host_of(model, optimizer);
  const schedule::Plan plan =
      runtime::preview_plans(model, options.route, request, pipeline.planner(), *engine, /*steps=*/1).front();
  prediction.host_values = simulate::waiting_on_host(plan, sizes.footprints, shape.microbatches);
  prediction.host_partial_sums =
      runtime::partial_sum_bytes(model, plan, options.gradient_groups, options.tied_grad_accumulation);
  const int64_t labels = shape.microbatches * sizes.label_bytes;
  if (options.fault_tolerant)
    prediction.kept_for_failures += prediction.host.gradients + 2 * prediction.host_values + labels;
  if (options.verify_every > 0) {
    // The weights and values that one job has read, and the results of its second run until they are compared.
    sizes.grain = RecomputeGrain::kStage;
    prediction.kept_for_failures +=
        2 * (simulate::largest_stage_bytes(std::span(&plan, 1), sizes) + prediction.host_values) + labels;
  }
  return prediction;
}

std::string MemoryPrediction::text() const {
  std::string lines;
  const auto row = [&](const char* name, int64_t bytes) {
    if (bytes > 0) lines += concat("\n  ", name, ": ", format_bytes(bytes));
  };
  lines += "on the fullest device:";
  row("weights", device.weights);
  row("gradients", device.gradients);
  row("values between stages", device.values);
  row("work of layers", device.work);
  row("frozen weights that stay", device.resident);
  row("together", device.total());
  lines += "\non the host:";
  row("weights", host.weights);
  row("gradients", host.gradients);
  row("partial sums of gradients", host_partial_sums);
  row("fp32 masters", host.masters);
  row("moments", host.moments);
  row("values between stages", host_values);
  row("kept for failures", kept_for_failures);
  row("together", host_total());
  return lines;
}

}  // namespace roundpipe
