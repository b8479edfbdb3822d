#include <pybind11/functional.h>

#include <roundpipe/command/step_lines.h>
#include <roundpipe/command/step_record.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;

namespace {

py::dict metrics_of(const Metrics& metrics) {
  py::dict values;
  for (const auto& [name, value] : metrics) values[py::str(name)] = py::cast(value);
  return values;
}

}  // namespace

void bind_step_records(py::module_& module) {
  ValueClass<StepRecord>(module, "StepRecord")
      .attribute("step", &StepRecord::step)
      .attribute("loss", &StepRecord::loss)
      .attribute("grad_norm", &StepRecord::grad_norm)
      .attribute("learning_rate", &StepRecord::learning_rate)
      .attribute("seconds", &StepRecord::seconds)
      .attribute("tokens", &StepRecord::tokens)
      .attribute("busy", &StepRecord::busy)
      .attribute("device_bytes", &StepRecord::device_bytes)
      .attribute("host_bytes", &StepRecord::host_bytes)
      .attribute("loss_scale", &StepRecord::loss_scale)
      .attribute("skipped_steps", &StepRecord::skipped_steps)
      .attribute("accuracy", &StepRecord::accuracy)
      .attribute("tokens_per_s", &StepRecord::tokens_per_s)
      .def(py::init([](int64_t step, double loss, double grad_norm, double learning_rate, double seconds,
                       int64_t tokens, std::optional<double> busy, int64_t device_bytes, int64_t host_bytes,
                       std::optional<double> loss_scale, int64_t skipped_steps, std::optional<double> accuracy) {
             return StepRecord{step, loss,         grad_norm,  learning_rate, seconds,       tokens,
                               busy, device_bytes, host_bytes, loss_scale,    skipped_steps, accuracy};
           }),
           py::arg("step"), py::arg("loss"), py::arg("grad_norm"), py::arg("learning_rate"), py::arg("seconds"),
           py::arg("tokens"), py::arg("busy") = py::none(), py::arg("device_bytes") = 0, py::arg("host_bytes") = 0,
           py::arg("loss_scale") = py::none(), py::arg("skipped_steps") = 0, py::arg("accuracy") = py::none())
      .def("metrics", [](const StepRecord& record) { return metrics_of(record.metrics()); })
      .def("line", [](const StepRecord& record) { return metrics_line(record.step, record.metrics()); })
      .def("text", &StepRecord::text);
  ValueClass<EvaluationRecord>(module, "EvaluationRecord")
      .attribute("step", &EvaluationRecord::step)
      .attribute("loss", &EvaluationRecord::loss)
      .attribute("counted", &EvaluationRecord::counted)
      .attribute("accuracy", &EvaluationRecord::accuracy)
      .def(py::init([](int64_t step, double loss, int64_t counted, std::optional<double> accuracy) {
             return EvaluationRecord{step, loss, counted, accuracy};
           }),
           py::arg("step"), py::arg("loss"), py::arg("counted"), py::arg("accuracy") = py::none())
      .def("metrics", [](const EvaluationRecord& record) { return metrics_of(record.metrics()); })
      .def("line", [](const EvaluationRecord& record) { return metrics_line(record.step, record.metrics()); })
      .def("text", &EvaluationRecord::text);
  using Released = py::call_guard<py::gil_scoped_release>;
  py::class_<StepLines>(module, "StepLines")
      .def(py::init([](const std::string& path, int64_t after_step, Tell tell) {
             return std::make_unique<StepLines>(path, after_step, std::move(tell));
           }),
           py::arg("path"), py::arg("after_step"), py::arg("tell"), Released())
      .def("add", &StepLines::add, py::arg("line"), Released())
      .def_property_readonly("lines", &StepLines::lines);
}

}  // namespace roundpipe::python
