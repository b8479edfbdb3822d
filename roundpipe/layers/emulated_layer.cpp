#include <roundpipe/layers/emulated_layer.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/custom_function.h>

#include <roundpipe/core/error.h>

namespace roundpipe::layers {

using runtime::Layer;
using runtime::LayerContext;
using runtime::LayerShell;
using runtime::Values;

namespace {

struct EmulatedFunction : public torch::autograd::Function<EmulatedFunction> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, int64_t queue, double forward_ms, double backward_ms) {
    context->saved_data["queue"] = queue;
    context->saved_data["backward_ms"] = backward_ms;
    context->save_for_backward({weight});
    reinterpret_cast<device::Queue*>(queue)->emulate(forward_ms);
    return input.clone();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    reinterpret_cast<device::Queue*>(context->saved_data["queue"].toInt())
        ->emulate(context->saved_data["backward_ms"].toDouble());
    const at::Tensor weight = context->get_saved_variables()[0];
    // Broadcast, so that the gradient takes almost no time on the host's cores.
    return {gradients[0], at::zeros({1}, weight.options()).expand_as(weight), at::Tensor(), at::Tensor(), at::Tensor()};
  }
};

class EmulatedShell final : public LayerShell {
 public:
  EmulatedShell(const EmulatedLayerOptions& options, c10::Device device) : options_(options) {
    for (const at::Tensor& tensor : {options.weight, options.frozen}) {
      if (tensor.defined()) parameters.push_back(at::empty({0}, tensor.options().device(device)));
    }
  }

  Values forward(const Values& inputs, const LayerContext& context) override {
    if (inputs.tensors.empty()) throw std::invalid_argument("[emulate] an emulated layer needs a tensor as input");
    Values outputs;
    outputs.tensors.push_back(EmulatedFunction::apply(inputs.tensors.front(), parameters.front(),
                                                      reinterpret_cast<int64_t>(context.queue), options_.forward_ms,
                                                      options_.backward_ms));
    outputs.structure = options_.structure ? options_.structure : inputs.structure;
    return outputs;
  }

 private:
  const EmulatedLayerOptions options_;
};

class EmulatedLayer final : public Layer {
 public:
  EmulatedLayer(std::string name, EmulatedLayerOptions options)
      : name_(std::move(name)), options_(std::move(options)) {}

  bool takes_memory() const override { return false; }
  std::string name() const override { return name_; }
  std::vector<memory::NamedTensor> parameters() const override {
    std::vector<memory::NamedTensor> parameters = {{"weight", options_.weight}};
    if (options_.frozen.defined()) parameters.push_back({"frozen", options_.frozen});
    return parameters;
  }
  std::vector<memory::NamedTensor> buffers() const override { return {}; }
  double emulated_update_ms() const override { return options_.update_ms; }
  bool leaves_parameters() const override { return true; }
  std::unique_ptr<LayerShell> make_shell(c10::Device device) override {
    return std::make_unique<EmulatedShell>(options_, device);
  }

 private:
  const std::string name_;
  const EmulatedLayerOptions options_;
};

}  // namespace

std::unique_ptr<Layer> make_emulated_layer(std::string name, EmulatedLayerOptions options) {
  return std::make_unique<EmulatedLayer>(std::move(name), std::move(options));
}

}  // namespace roundpipe::layers
