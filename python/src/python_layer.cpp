#include "python_layer.h"

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/error.h>
#include <roundpipe/runtime/model/loss_scale.h>

#include "interpreter_lock.h"
#include "models/passage.h"
#include "python_values.h"

namespace roundpipe::python {

namespace py = pybind11;
using memory::NamedTensor;
using runtime::LayerContext;
using runtime::Values;

namespace {

py::tuple context_tuple(const LayerContext& context) {
  return py::make_tuple(context.call, context.layer, context.microbatch, context.recompute);
}

std::vector<NamedTensor> named_tensors(const py::object& list) {
  std::vector<NamedTensor> tensors;
  for (const py::handle entry : list) {
    const auto pair = entry.cast<std::pair<std::string, at::Tensor>>();
    tensors.push_back({pair.first, pair.second});
  }
  return tensors;
}

// The passage that a layer has begun, or else the one that it is part of. `made`: (tensors, structure, passage), with
// False if the layer has begun none, and None if it never does.
std::shared_ptr<const Passage> passage_after(const py::object& made, const Values& inputs) {
  const py::object begun = made[py::int_(2)];
  if (py::isinstance<py::bool_>(begun)) return nullptr;
  if (!begun.is_none()) return begun.cast<std::shared_ptr<Passage>>();
  const PythonStructure* const structure = structure_of(inputs);
  return structure == nullptr || structure->passage == nullptr ? nullptr : structure->passage->shared_from_this();
}

class PythonShell final : public runtime::LayerShell {
 public:
  // REQUIRES: the interpreter lock.
  explicit PythonShell(py::object object)
      : object_(share(object)), run_(share(object.attr("run"))), refresh_(share(object.attr("refresh"))) {
    parameters = object.attr("parameters").cast<std::vector<at::Tensor>>();
    buffers = object.attr("buffers").cast<std::vector<at::Tensor>>();
  }

  Values forward(const Values& inputs, const LayerContext& context) override {
    return in_python([&] {
      const py::object made = object_of(run_)(inputs.tensors, structure_object(inputs), context_tuple(context));
      Values outputs = values_from(made, passage_after(made, inputs));
      require_own_process();  // the layer's code may have forked
      return outputs;
    });
  }

  void refresh(const std::shared_ptr<const void>& attributes) override {
    in_python([&] { object_of(refresh_)(object_of(attributes)); });
  }

 private:
  SharedObject object_;
  SharedObject run_;
  SharedObject refresh_;
};

class PythonLayer final : public runtime::Layer {
 public:
  explicit PythonLayer(py::object object)
      : name_(object.attr("name").cast<std::string>()), object_(share(std::move(object))) {}

  std::string name() const override { return name_; }

  std::shared_ptr<const void> hold() const override { return std::make_shared<const InterpreterLock>(); }

  std::vector<NamedTensor> parameters() const override {
    return in_python([&] { return named_tensors(object_of(object_).attr("parameters")()); });
  }

  std::vector<NamedTensor> buffers() const override {
    return in_python([&] { return named_tensors(object_of(object_).attr("buffers")()); });
  }

  uint64_t mode_key() const override {
    return in_python([&] { return object_of(object_).attr("mode_key")().cast<uint64_t>(); });
  }

  std::string kind() const override {
    return in_python([&] { return object_of(object_).attr("kind")().cast<std::string>(); });
  }

  std::shared_ptr<const void> attributes() const override {
    return in_python([&] {
      py::object now = object_of(object_).attr("attributes")();
      if (now.ptr() != attributes_.get()) attributes_ = share(std::move(now));
      return attributes_;
    });
  }

  std::unique_ptr<runtime::LayerShell> make_shell(c10::Device device) override {
    return in_python(
        [&] { return std::make_unique<PythonShell>(object_of(object_).attr("make_shell")(device.str())); });
  }

 private:
  const std::string name_;
  const SharedObject object_;
  mutable SharedObject attributes_;  // the latest result of attributes(); protected by the interpreter lock
};

class PythonLoss final : public runtime::Loss {
 public:
  explicit PythonLoss(const py::object& object)
      : object_(share(object)),
        own_parts_(object.attr("own_parts").cast<std::optional<int64_t>>()),
        own_scale_(object.attr("own_scale").cast<std::shared_ptr<runtime::LossScale>>()) {}

  std::vector<at::Tensor> operator()(const Values& outputs, const Values& label, const LayerContext& context) override {
    const PythonStructure* const structure = structure_of(outputs);
    if (own_parts_ && structure != nullptr && structure->passage != nullptr && structure->passage->is_loss(structure)) {
      return {own_loss(outputs.tensors.front())};
    }
    return in_python([&] {
      auto losses = object_of(object_)(values_to(outputs), values_to(label), context_tuple(context))
                        .cast<std::vector<at::Tensor>>();
      require_own_process();
      return losses;
    });
  }

 private:
  // The same as `object_` makes of this loss of the model, without Python.
  at::Tensor own_loss(const at::Tensor& of_model) const {
    const at::Tensor part = *own_parts_ == 1 ? of_model : of_model.div(*own_parts_);
    return own_scale_ ? part.mul(own_scale_->use().to(part.device())) : part;
  }

  const SharedObject object_;
  const std::optional<int64_t> own_parts_;               // none: another function of the outputs
  const std::shared_ptr<runtime::LossScale> own_scale_;  // null: the loss is not scaled
};

}  // namespace

std::unique_ptr<runtime::Layer> make_python_layer(py::object object) {
  return std::make_unique<PythonLayer>(std::move(object));
}

std::shared_ptr<runtime::Loss> make_python_loss(py::object object) { return std::make_shared<PythonLoss>(object); }

}  // namespace roundpipe::python
