#include <roundpipe/training/layer_meter.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/autograd.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/device/virtual/memory_meter.h>
#include <roundpipe/memory/crossing.h>
#include <roundpipe/runtime/model/parameter_watch.h>
#include <roundpipe/runtime/model/random.h>
#include <roundpipe/torch_compat/autograd_nodes.h>

namespace roundpipe {

using runtime::Values;
using simulate::LayerFootprint;

namespace {

constexpr uint64_t kTrial = 0;  // the number of executions that belong to no call: the engine counts from 1

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

// Ends what an interpreter has kept for the trial.
struct Trial {
  ~Trial() { frontend().call_over(kTrial); }
};

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

std::unique_ptr<runtime::LayerShell> filled_shell(const runtime::LayerState& state, bool trains, c10::Device device) {
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
    own.set_requires_grad(trains && parameters[i].tensor.requires_grad());
  }
  for (size_t i = 0; i < state.buffers.size(); ++i)
    shell->buffers[i].set_data(state.buffers[i].tensor.detach().to(device).clone());
  return shell;
}

struct Measured {
  LayerFootprint footprint;
  Values outputs;  // on the host
};

// Runs one layer and, if there is one, the loss.
Measured measure_layer(const runtime::LayerState& state, int index, const Values& values, const Values& label,
                       const LossFunction& loss, bool trains, device::Device& on) {
  const c10::Device device = on.torch_device();
  Meter meter(on);
  Measured measured;
  LayerFootprint& footprint = measured.footprint;
  footprint.inputs = memory::settled_bytes(values.tensors);
  const std::unique_ptr<runtime::LayerShell> shell = filled_shell(state, trains, device);
  const std::vector<at::Tensor> leaves = crossed(values.tensors, device);
  // A layer may write to its inputs in place, which autograd forbids for leaves.
  Values inputs{torch_compat::cross_boundary(leaves), values.structure};
  runtime::ParameterWatch watch(shell->parameters, std::vector<char>(shell->parameters.size(), 1));
  const int64_t base = meter.current_bytes();
  meter.reset_peak();
  runtime::LayerContext context;
  context.call = kTrial;
  context.layer = index;
  context.queue = &on.compute();
  Values outputs = shell->forward(inputs, context);
  for (const at::Tensor& output : outputs.tensors) {
    if (memory::place_of(output, inputs.tensors) == inputs.tensors.size())
      footprint.outputs += memory::settled_bytes(output);
  }
  outputs.tensors = torch_compat::cross_boundary(outputs.tensors);
  std::vector<at::Tensor> roots = loss ? loss(outputs, label) : outputs.tensors;
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
  measured.outputs = {crossed(outputs.tensors, c10::kCPU), outputs.structure};
  const int64_t held = meter.current_bytes();
  outputs.tensors.clear();
  meter.reset_peak();
  if (trains && !roots.empty()) torch::autograd::backward(roots, gradients);
  footprint.backward = std::max(footprint.saved, footprint.saved + meter.peak_bytes() - held);
  return measured;
}

// Of layers that take the same: their kind, and what they are given; empty for a layer like no other.
std::string kind_of(const runtime::LayerState& state, bool ends, const Values& inputs) {
  std::string kind = state.layer->kind();
  if (kind.empty()) return kind;
  kind += ends ? " ends" : " goes on";
  for (const at::Tensor& input : inputs.tensors)
    kind += concat(" ", input.sizes(), input.scalar_type(), input.requires_grad());
  return kind;
}

}  // namespace

std::vector<LayerFootprint> measure_layers(const runtime::ModelState& model, const Values& batch, const Values& label,
                                           const LossFunction& loss, bool trains, device::Device& device) {
  const std::shared_ptr<void> uncollected = frontend().without_collection();
  const Trial trial;
  const runtime::DrawsApart draws(torch_compat::kUnseeded, device.torch_device());
  const at::AutoGradMode grad_mode(true);
  const Values own_label{crossed(label.tensors, device.torch_device()), label.structure};
  std::map<std::string, Measured> known;
  std::vector<LayerFootprint> footprints;
  Values values = batch;
  for (int l = 0; l < model.layer_count(); ++l) {
    const bool ends = l + 1 == model.layer_count();
    const runtime::LayerState& state = *model.layers[static_cast<size_t>(l)];
    const std::string kind = kind_of(state, ends, values);
    auto found = known.find(kind);
    if (kind.empty() || found == known.end()) {
      try {
        Measured measured = measure_layer(state, l, values, own_label, ends ? loss : LossFunction(), trains, device);
        found = known.insert_or_assign(kind, std::move(measured)).first;
      } catch (...) {
        frontend().clear_error();  // first: torch leaves it in the thread's state, too
        throw;
      }
    }
    footprints.push_back(found->second.footprint);
    values = found->second.outputs;
  }
  return footprints;
}

}  // namespace roundpipe
