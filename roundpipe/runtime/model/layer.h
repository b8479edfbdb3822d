#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/device/device.h>
#include <roundpipe/memory/parameter_block.h>

namespace roundpipe::runtime {

// What travels between layers: the tensors, and whatever else the layer kind needs to put them together again (a
// pytree for Python layers). The engine moves the tensors and hands the structure on untouched.
struct Values {
  std::vector<at::Tensor> tensors;
  std::shared_ptr<const void> structure;
};

// Which execution of a layer this is.
struct LayerContext {
  uint64_t call = 0;  // unique in the process
  int layer = 0;
  int microbatch = 0;
  bool recompute = false;  // the forward of this microbatch has run before
  device::Queue* queue = nullptr;
};

// One device's instance of a layer: the layer's code over tensors that the engine points at the weights of a job.
// Used by one thread, the device's.
class LayerShell {
 public:
  virtual ~LayerShell() = default;

  // Runs the layer on this device. Grad mode, autocast and random state are set by the caller.
  virtual Values forward(const Values& inputs, const LayerContext& context) = 0;

  // Takes over what Layer::attributes() returned for the call that runs now. Not called again for the same object.
  virtual void refresh(const std::shared_ptr<const void>& /*attributes*/) {}

  // Leaves, in the order of Layer::parameters(); the engine sets their data and requires_grad.
  std::vector<at::Tensor> parameters;
  // In the order of Layer::buffers(). The layer writes to them in place.
  std::vector<at::Tensor> buffers;
};

// A layer as the user made it: the unit of weight movement. The tensors are the user's own.
class Layer {
 public:
  virtual ~Layer() = default;
  virtual std::string name() const = 0;
  // What the layer takes while it is asked something or a shell of it runs (the interpreter lock), for this thread to
  // keep over several of them. Null: nothing.
  virtual std::shared_ptr<const void> hold() const { return nullptr; }
  // Two layers that return the same tensor (same TensorImpl) are tied.
  virtual std::vector<memory::NamedTensor> parameters() const = 0;
  virtual std::vector<memory::NamedTensor> buffers() const = 0;
  // A value that changes when the layer may start or stop drawing random numbers or writing its buffers: whatever
  // was learned about it is learned anew.
  virtual uint64_t mode_key() const { return 0; }
  // What else the layer is at this moment (training flags, plain attributes), for its shells. Asked on the caller's
  // thread when a call is made: the caller may change the layer while the call runs. The same object as before means
  // that nothing has changed since.
  virtual std::shared_ptr<const void> attributes() const { return nullptr; }
  // What an update of the layer's parameters is pretended to take; 0 = they are really updated.
  virtual double emulated_update_ms() const { return 0; }
  virtual std::unique_ptr<LayerShell> make_shell(c10::Device device) = 0;
};

// The user's loss, run where the last stage's output is.
class Loss {
 public:
  virtual ~Loss() = default;
  // Scalars, summed for the backward. Structure of `label` as the caller gave it.
  virtual std::vector<at::Tensor> operator()(const Values& outputs, const Values& label,
                                             const LayerContext& context) = 0;
};

}  // namespace roundpipe::runtime
