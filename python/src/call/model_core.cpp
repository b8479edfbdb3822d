#include <pybind11/functional.h>

#include <roundpipe/training/microbatch_choice.h>
#include <roundpipe/training/model_core.h>

#include "bindings.h"
#include "models/passage.h"
#include "python_layer.h"
#include "python_values.h"

namespace roundpipe::python {

namespace py = pybind11;
using runtime::Pipeline;
using runtime::Values;

namespace {

// Values with the same structure object share their structure: each that is dropped takes the interpreter lock.
std::vector<Values> values_list(const py::list& list) {
  std::vector<Values> result;
  py::handle last;
  for (const py::handle entry : list) {
    const py::object structure = entry[py::int_(1)];
    if (!result.empty() && structure.is(last)) {
      result.push_back({entry[py::int_(0)].cast<std::vector<at::Tensor>>(), result.back().structure});
    } else {
      result.push_back(values_from(entry));
    }
    last = structure;
  }
  return result;
}

// `loss`: None: none. `passages`: of each microbatch, the one that its inputs enter natively, or None.
CallArguments arguments_from(const py::list& inputs, const py::list& labels, const py::object& loss, bool changeable,
                             std::vector<std::string> savers, const std::vector<std::shared_ptr<Passage>>& passages) {
  CallArguments arguments;
  arguments.inputs = values_list(inputs);
  for (size_t m = 0; m < arguments.inputs.size(); ++m) {
    Values& values = arguments.inputs[m];
    arguments.general_structures.push_back(values.structure);
    if (passages.at(m) != nullptr) values.structure = passages[m]->entered();
  }
  arguments.labels = values_list(labels);
  if (!loss.is_none()) {
    arguments.call_loss = make_python_loss(loss);
    arguments.loss = [own = arguments.call_loss](const Values& outputs, const Values& label) {
      return (*own)(outputs, label, runtime::LayerContext());
    };
  }
  arguments.changeable = changeable;
  arguments.savers = std::move(savers);
  return arguments;
}

py::list values_list(const std::vector<Values>& list) {
  py::list result;
  for (const Values& values : list) result.append(values_to(values));
  return result;
}

}  // namespace

void bind_model_core(py::module_& module) {
  py::class_<CallArguments>(module, "CallArguments")
      .def(py::init(&arguments_from), py::arg("inputs"), py::arg("labels"), py::arg("loss"), py::arg("changeable"),
           py::arg("savers"), py::arg("passages"));
  ValueClass<CallResult>(module, "CallResult")
      .attribute("losses", &CallResult::losses)
      .attribute("outputs", [](const CallResult& result) { return values_list(result.outputs); });
  py::enum_<Activations>(module, "Activations")
      .value("DEVICE", Activations::kDevice)
      .value("HOST", Activations::kHost)
      .value("RECOMPUTE", Activations::kRecompute);
  ValueClass<MemoryPrediction>(module, "MemoryPrediction")
      .attribute("device", &MemoryPrediction::device)
      .attribute("measured_bytes", &MemoryPrediction::measured_bytes)
      .attribute("host", &MemoryPrediction::host)
      .attribute("recompute_grain", &MemoryPrediction::recompute_grain)
      .attribute("activations", &MemoryPrediction::activations)
      .def("text", &MemoryPrediction::text);
  ValueClass<MicrobatchChoice>(module, "MicrobatchChoice")
      .attribute("count", &MicrobatchChoice::count)
      .attribute("reason", &MicrobatchChoice::reason);
  module.attr("MOST_MICROBATCHES") = kMostMicrobatches;
  module.def("choose_microbatches", &choose_microbatches, py::arg("pipeline"), py::arg("most"), py::arg("groups"),
             py::arg("fits"), py::call_guard<py::gil_scoped_release>());
  py::class_<PendingCall, std::shared_ptr<PendingCall>>(module, "PendingCall")
      .def("finish", &PendingCall::finish, py::call_guard<py::gil_scoped_release>())
      .def("records", &PendingCall::records);
  py::class_<ModelCore, std::shared_ptr<ModelCore>>(module, "ModelCore")
      .def(py::init([](std::shared_ptr<Pipeline> pipeline, std::optional<int64_t> host_memory,
                       std::optional<int64_t> device_memory, bool measures, bool checks_loss) {
             const MemoryBudget budget{host_memory, device_memory, measures};
             return std::make_shared<ModelCore>(std::move(pipeline), budget, checks_loss);
           }),
           py::arg("pipeline"), py::arg("host_memory"), py::arg("device_memory"), py::arg("measures"),
           py::arg("checks_loss"))
      .def(
          "forward",
          [](ModelCore& core, const CallArguments& arguments, const RunOptions& options) {
            std::vector<Values> outputs;
            {
              const py::gil_scoped_release no_gil;
              outputs = core.forward(arguments, options);
            }
            return values_list(outputs);
          },
          py::arg("arguments"), py::arg("options"))
      .def("submit", &ModelCore::submit, py::arg("arguments"), py::arg("options"), py::arg("keep_outputs"),
           py::arg("refuses_nan_early"), py::call_guard<py::gil_scoped_release>())
      .def("predict_memory", &ModelCore::predict_memory, py::arg("arguments"), py::arg("options"),
           py::call_guard<py::gil_scoped_release>())
      .def("last_prediction", [](ModelCore& core) { return core.memory().last(); })
      .def("footprints", &ModelCore::footprints, py::arg("arguments"), py::arg("options"),
           py::call_guard<py::gil_scoped_release>())
      .def("fits", &ModelCore::fits, py::arg("arguments"), py::arg("options"),
           py::call_guard<py::gil_scoped_release>());
}

}  // namespace roundpipe::python
