#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::runtime::support {

using Tensors = std::vector<at::Tensor>;

// The function that a layer computes. It runs in the pipeline on a device's tensors and in the plain loop on the
// reference's, so that results can be compared bit for bit.
using Body =
    std::function<Tensors(Tensors inputs, const Tensors& parameters, const Tensors& buffers, const LayerContext&)>;

struct LayerSpec {
  std::string name;
  std::vector<memory::NamedTensor> parameters;
  std::vector<memory::NamedTensor> buffers;
  Body body;
  // The result of attributes(), changed from outside; null: the layer has none.
  std::shared_ptr<std::shared_ptr<const void>> attributes;

  explicit LayerSpec(std::string layer_name) : name(std::move(layer_name)) {}
};

// Counts live shells and running forwards of all layers.
struct ShellCounts {
  std::atomic<int> alive{0};
  std::atomic<int> made{0};
  std::atomic<int> refreshed{0};
};
inline ShellCounts& shell_counts() {
  static ShellCounts counts;
  return counts;
}

class NativeShell final : public LayerShell {
 public:
  NativeShell(const LayerSpec& spec, c10::Device device) : body_(spec.body) {
    for (const memory::NamedTensor& parameter : spec.parameters) {
      parameters.push_back(at::empty({0}, parameter.tensor.options().device(device).requires_grad(false)));
    }
    for (const memory::NamedTensor& buffer : spec.buffers) {
      buffers.push_back(at::empty({0}, buffer.tensor.options().device(device)));
    }
    ++shell_counts().alive;
    ++shell_counts().made;
  }
  ~NativeShell() override { --shell_counts().alive; }

  Values forward(const Values& inputs, const LayerContext& context) override {
    return {body_(inputs.tensors, parameters, buffers, context), inputs.structure};
  }
  void refresh(const std::shared_ptr<const void>&) override { ++shell_counts().refreshed; }

 private:
  const Body body_;
};

class NativeLayer final : public Layer {
 public:
  explicit NativeLayer(LayerSpec spec) : spec_(std::move(spec)) {}
  std::string name() const override { return spec_.name; }
  std::vector<memory::NamedTensor> parameters() const override { return spec_.parameters; }
  std::vector<memory::NamedTensor> buffers() const override { return spec_.buffers; }
  std::shared_ptr<const void> attributes() const override { return spec_.attributes ? *spec_.attributes : nullptr; }
  std::unique_ptr<LayerShell> make_shell(c10::Device device) override {
    return std::make_unique<NativeShell>(spec_, device);
  }

 private:
  const LayerSpec spec_;
};

// The values of the test models: [0] is the activation [rows, width], [1] a mask [rows, 1] that most layers pass on.
inline at::Tensor parameter(at::IntArrayRef sizes, double scale) {
  return (at::randn(sizes) * scale).set_requires_grad(true);
}

inline LayerSpec linear_layer(std::string name, int64_t width) {
  LayerSpec spec(std::move(name));
  spec.parameters = {{"weight", parameter({width, width}, 0.4)}, {"bias", parameter({width}, 0.1)}};
  spec.body = [](Tensors inputs, const Tensors& parameters, const Tensors&, const LayerContext&) {
    // No backward saves the output, so the next layer may change it in place.
    inputs[0] = at::linear(at::tanh(inputs[0]), parameters[0], parameters[1]);
    return inputs;
  };
  return spec;
}

// A linear layer that uses another layer's weight.
inline LayerSpec tied_layer(std::string name, const at::Tensor& weight) {
  LayerSpec spec(std::move(name));
  spec.parameters = {{"weight", weight}, {"scale", parameter({weight.size(0)}, 0.3)}};
  spec.body = [](Tensors inputs, const Tensors& parameters, const Tensors&, const LayerContext&) {
    inputs[0] = at::linear(inputs[0], parameters[0]) * parameters[1];
    return inputs;
  };
  return spec;
}

inline LayerSpec dropout_layer(std::string name, double probability = 0.3) {
  LayerSpec spec(std::move(name));
  spec.body = [probability](Tensors inputs, const Tensors&, const Tensors&, const LayerContext&) {
    inputs[0] = at::dropout(inputs[0], probability, /*train=*/true);
    return inputs;
  };
  return spec;
}

// Batch normalisation in training mode: writes its running statistics.
inline LayerSpec norm_layer(std::string name, int64_t width) {
  LayerSpec spec(std::move(name));
  spec.parameters = {{"weight", at::ones({width}).set_requires_grad(true)},
                     {"bias", at::zeros({width}).set_requires_grad(true)}};
  spec.buffers = {
      {"running_mean", at::zeros({width})}, {"running_var", at::ones({width})}, {"batches", at::zeros({}, at::kLong)}};
  spec.body = [](Tensors inputs, const Tensors& parameters, const Tensors& buffers, const LayerContext&) {
    buffers[2].add_(1);
    inputs[0] = at::batch_norm(inputs[0], parameters[0], parameters[1], buffers[0], buffers[1], /*training=*/true,
                               /*momentum=*/0.1, /*eps=*/1e-5, /*cudnn_enabled=*/false);
    return inputs;
  };
  return spec;
}

// Reads a buffer and does not change it.
inline LayerSpec shift_layer(std::string name, int64_t width) {
  LayerSpec spec(std::move(name));
  spec.parameters = {{"gain", parameter({width}, 1.0)}};
  spec.buffers = {{"shift", at::randn({width})}};
  spec.body = [](Tensors inputs, const Tensors& parameters, const Tensors& buffers, const LayerContext&) {
    inputs[0] = inputs[0] * parameters[0] + buffers[0];
    return inputs;
  };
  return spec;
}

// Changes its input in place.
inline LayerSpec inplace_layer(std::string name) {
  LayerSpec spec(std::move(name));
  spec.body = [](Tensors inputs, const Tensors&, const Tensors&, const LayerContext&) {
    inputs[0].mul_(0.75).add_(0.125);
    return inputs;
  };
  return spec;
}

inline LayerSpec mask_layer(std::string name) {
  LayerSpec spec(std::move(name));
  spec.body = [](Tensors inputs, const Tensors&, const Tensors&, const LayerContext&) {
    inputs[0] = inputs[0] * inputs[1];
    return inputs;
  };
  return spec;
}

struct InjectedFault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Six layers: among them are some that draw, that write buffers, that write to their inputs and that share a weight.
inline std::vector<LayerSpec> all_kinds(int64_t width) {
  at::manual_seed(1);
  std::vector<LayerSpec> layers = {linear_layer("a", width), norm_layer("b", width), dropout_layer("c"),
                                   linear_layer("d", width), inplace_layer("e")};
  layers.push_back(tied_layer("f", layers.front().parameters.front().tensor));
  return layers;
}

// A place that throws once: on the `countdown`-th visit.
class Fault {
 public:
  void arm(int countdown) { countdown_.store(countdown); }
  // Whether it has thrown since it was armed; disarms it.
  bool disarm() { return countdown_.exchange(0) == kThrown; }
  void pass(const char* where) {
    int left = countdown_.load();
    while (left > 0 && !countdown_.compare_exchange_weak(left, left == 1 ? kThrown : left - 1)) {
    }
    if (left == 1) throw InjectedFault(where);
  }

 private:
  static constexpr int kThrown = -1;
  std::atomic<int> countdown_{0};
};

}  // namespace roundpipe::runtime::support
