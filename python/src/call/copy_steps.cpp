#include <roundpipe/training/copy_steps.h>

#include "bindings.h"
#include "python_values.h"

namespace roundpipe::python {

namespace py = pybind11;
using runtime::FunctionThread;

namespace {

// A function of Python that any thread may call and drop.
template <typename Result>
std::function<Result()> callable(py::object function) {
  return [function = share(std::move(function))]() -> Result {
    return in_python([&] { return object_of(function)().template cast<Result>(); });
  };
}

}  // namespace

void bind_copy_steps(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<FunctionThread::Run, FunctionThread::RunPtr>(module, "FunctionRun")
      .def("wait", &FunctionThread::Run::wait, unlocked)
      .def("result", &FunctionThread::Run::result);
  module.def(
      "after_step_functions",
      [](py::object function) { return FunctionThread::instance().queue(callable<bool>(std::move(function))); },
      py::arg("function"));
  module.def("wait_step_functions", [] { FunctionThread::instance().wait_all(); }, unlocked);
  module.def("require_no_step_function", &FunctionThread::require_elsewhere);
  py::class_<CopySteps, std::shared_ptr<CopySteps>>(module, "CopySteps")
      .def(py::init<CopySteps::Pipelines, std::vector<at::Tensor>>(), py::arg("models"), py::arg("host_parameters"))
      .def("set_copies", &CopySteps::set_copies, py::arg("named"), py::arg("sources"), py::arg("copies"), unlocked)
      .def("late_parameter", &CopySteps::late_parameter)
      .def_property_readonly("has_copies", &CopySteps::has_copies)
      .def("publish_written_copies", &CopySteps::publish_written_copies, unlocked)
      .def("publish_copies", &CopySteps::publish_copies, unlocked)
      .def("take_writes", &CopySteps::take_writes, unlocked)
      .def("prepare_step", &CopySteps::prepare_step, py::arg("asynchronous"), unlocked)
      .def(
          "queue_step",
          [](CopySteps& steps, py::object function) {
            std::function<void()> queued = callable<void>(std::move(function));
            const py::gil_scoped_release no_gil;
            steps.queue_step(std::move(queued));
          },
          py::arg("function"))
      .def("settle_step", &CopySteps::settle_step, unlocked)
      .def("finish_update", &CopySteps::finish_update, unlocked)
      .def(
          "keep_for",
          [](CopySteps& steps, py::object wait_read) { steps.keep_for(callable<void>(std::move(wait_read))); },
          py::arg("wait_read"))
      .def("synchronize", &CopySteps::synchronize, unlocked)
      .def("show_weights", &CopySteps::show_weights, unlocked)
      .def("hand_over", &CopySteps::hand_over, unlocked)
      .def("changed_from_outside", &CopySteps::changed_from_outside, unlocked)
      .def("clear_gradients", &CopySteps::clear_gradients, py::arg("set_to_none"), unlocked)
      .def_property_readonly("has_landed_gradients", &CopySteps::has_landed_gradients);
}

}  // namespace roundpipe::python
