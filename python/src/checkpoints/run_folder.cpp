#include <roundpipe/files/run_folder.h>

#include <roundpipe/files/journal.h>
#include <roundpipe/files/steps.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using namespace files;  // NOLINT: this file binds this namespace

namespace {

void bind_steps(py::module_& module) {
  ValueClass<FoundStep>(module, "FoundStep")
      .attribute("step", &FoundStep::step)
      .attribute("folder", &FoundStep::folder)
      .attribute("problem", &FoundStep::problem);
  module.def(
      "require_complete", [](const std::string& folder) { return require_complete(folder); }, py::arg("folder"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "find_steps", [](const std::string& run_folder) { return find_steps(run_folder); }, py::arg("run_folder"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "complete_steps", [](const std::string& run_folder) { return complete_steps(run_folder); }, py::arg("run_folder"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "latest_step", [](const std::string& run_folder) { return latest_step(run_folder); }, py::arg("run_folder"),
      py::call_guard<py::gil_scoped_release>());
}

void bind_journal(py::module_& module) {
  ValueClass<JournalRecord>(module, "JournalRecord")
      .attribute("step", &JournalRecord::step)
      .attribute("text", &JournalRecord::text);
  ValueClass<JournalContents>(module, "JournalContents")
      .attribute("records", &JournalContents::records)
      .attribute("notice", &JournalContents::notice)
      .attribute("whole_bytes", &JournalContents::whole_bytes);
  module.def(
      "read_journal",
      [](const std::string& run_folder, int64_t after_step) { return read_journal(run_folder, after_step); },
      py::arg("run_folder"), py::arg("after_step") = -1, py::call_guard<py::gil_scoped_release>());
  py::class_<Journal>(module, "Journal")
      .def_property_readonly("notice", &Journal::notice)
      .def("recorded", &Journal::recorded, py::arg("step"), py::call_guard<py::gil_scoped_release>())
      .def("last_recorded", &Journal::last_recorded, py::call_guard<py::gil_scoped_release>())
      .def("append", &Journal::append, py::arg("step"), py::arg("text"), py::call_guard<py::gil_scoped_release>())
      .def("rewind", &Journal::rewind, py::arg("step"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_run_folder(py::module_& module) {
  bind_steps(module);
  bind_journal(module);
  ValueClass<Pruned>(module, "Pruned").attribute("removed", &Pruned::removed).attribute("notices", &Pruned::notices);
  py::class_<RunFolder, std::shared_ptr<RunFolder>>(module, "RunFolder")
      .def(py::init([](const std::string& folder) {
             const py::gil_scoped_release unlocked;
             return std::make_unique<RunFolder>(folder);
           }),
           py::arg("folder"))
      .def_property_readonly("path", &RunFolder::path)
      .def_property_readonly("notices", &RunFolder::notices)
      .def("open_journal", &RunFolder::open_journal, py::arg("after_step"), py::call_guard<py::gil_scoped_release>())
      .def("steps", &RunFolder::steps, py::call_guard<py::gil_scoped_release>())
      .def("latest", &RunFolder::latest, py::call_guard<py::gil_scoped_release>())
      .def(
          "prune",
          [](RunFolder& run, int64_t keep_last, int64_t keep_every, std::optional<int64_t> newest) {
            return run.prune({keep_last, keep_every, newest});
          },
          py::arg("keep_last"), py::arg("keep_every") = 0, py::arg("newest") = py::none(),
          py::call_guard<py::gil_scoped_release>());
}

}  // namespace roundpipe::python
