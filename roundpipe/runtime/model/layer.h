#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/core/error.h>
#include <roundpipe/device/device.h>
#include <roundpipe/memory/parameter_block.h>
#include <roundpipe/runtime/model/values.h>

namespace roundpipe::runtime {

// Identifies one execution of a layer.
struct LayerContext {
  uint64_t call = 0;  // unique in the process
  int layer = 0;
  int microbatch = 0;
  bool recompute = false;  // whether the forward of this microbatch has run before
  // Whether somebody reads the values of the outputs; else only their graph is used, and the layer may leave out what
  // its backward does not need. Shapes and dtypes count in any case.
  bool outputs_are_read = true;
  device::Queue* queue = nullptr;
  // Of this thread's generators, for a loss that may restart them; none: they go on from microbatch to microbatch.
  std::optional<uint64_t> seed = std::nullopt;
};

// One device's instance of a layer: the layer's code over tensors that the engine points at the weights of a job.
// Used by one thread, the device's.
class ROUNDPIPE_API LayerShell {
 public:
  virtual ~LayerShell() = default;

  // Runs the layer on this device. The caller has set grad mode, autocast and random state.
  virtual Values forward(const Values& inputs, const LayerContext& context) = 0;

  // Applies the attributes that Layer::attributes() returned for the current call. Called once for each such object.
  virtual void refresh(const std::shared_ptr<const void>& /*attributes*/) {}

  // Leaves, in the order of Layer::parameters(); the engine sets their data and requires_grad.
  std::vector<at::Tensor> parameters;
  // In the order of Layer::buffers(). The layer writes to them in place.
  std::vector<at::Tensor> buffers;
};

// A layer as the user made it: the unit of weight movement. The tensors are the user's own.
class ROUNDPIPE_API Layer {
 public:
  virtual ~Layer() = default;
  virtual std::string name() const = 0;
  // Returns a lock that the layer takes whenever it is asked something or a shell of it runs (the interpreter lock).
  // This thread may keep it over several such calls. Null: there is none.
  virtual std::shared_ptr<const void> hold() const { return nullptr; }
  // Two layers that return the same tensor (same TensorImpl) are tied.
  virtual std::vector<memory::NamedTensor> parameters() const = 0;
  virtual std::vector<memory::NamedTensor> buffers() const = 0;
  // A value that changes when the layer may start or stop drawing random numbers or writing its buffers. The layer's
  // habits are learned separately for each value.
  virtual uint64_t mode_key() const { return 0; }
  // The layer's other state at this moment (training flags, plain attributes), for its shells. Asked on the caller's
  // thread when a call is made, since the caller may change the layer while the call runs. Returns the same object as
  // before if nothing has changed.
  virtual std::shared_ptr<const void> attributes() const { return nullptr; }
  // How long an update of the layer's parameters is pretended to take; 0 = they are really updated.
  virtual double emulated_update_ms() const { return 0; }
  // Equal for layers of one model that differ only in their weights, so that one tells what memory each takes; empty:
  // nobody knows.
  virtual std::string kind() const { return {}; }
  // False for a layer that only takes time.
  virtual bool takes_memory() const { return true; }
  // Whether a forward is known to leave the parameters as they are, so that nobody has to look (see ParameterWatch).
  virtual bool leaves_parameters() const { return false; }
  virtual std::unique_ptr<LayerShell> make_shell(c10::Device device) = 0;
};

// The user's loss. It runs on the device that has the last stage's outputs.
class ROUNDPIPE_API Loss {
 public:
  virtual ~Loss() = default;
  // Returns scalars, which are summed for the backward. `label` has the structure in which the caller passed it.
  virtual std::vector<at::Tensor> operator()(const Values& outputs, const Values& label,
                                             const LayerContext& context) = 0;
  // Whether the results of a call's microbatches depend on those before them, in the order of the plan. Then they are
  // computed one after the other until this is false; it never becomes true again. Any thread.
  virtual bool is_open() const { return false; }
  // What the user should know, once all results are there; empty: nothing. Shown once for each model.
  virtual std::string notice() const { return {}; }
};

}  // namespace roundpipe::runtime
