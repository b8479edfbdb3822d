#include <pybind11/functional.h>

#include <roundpipe/command/training_options.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;

void bind_training_options(py::module_& module) {
  py::class_<TrainingOption>(module, "TrainingOption")
      .def_readonly("name", &TrainingOption::name)
      .def_readonly("help", &TrainingOption::help)
      .def_readonly("otherwise", &TrainingOption::otherwise)
      .def_readonly("choices", &TrainingOption::choices)
      .def_readonly("of_a_machine", &TrainingOption::of_a_machine);
  module.def("training_options", &training_options);
  module.def("check_training_options", &check_training_options, py::arg("values"));
  module.def("check_options_of_nodes", &check_options_of_nodes, py::arg("values"), py::arg("nodes"));
  module.def("fixed_training_options", &fixed_training_options, py::arg("values"));
  module.def("note_of_few_steps", &note_of_few_steps, py::arg("values"), py::arg("steps"));
  module.def("require_same_options", &require_same_options, py::arg("before"), py::arg("now"), py::arg("run"));
  module.def("rule_options", &rule_options, py::arg("values"));
  module.def("beside_muon", &beside_muon, py::arg("values"));
  module.def("trains_adapters", &trains_adapters, py::arg("values"));
  module.def("learning_rate", &learning_rate, py::arg("values"), py::arg("steps"));
  module.def("tokens_of_step", &tokens_of_step, py::arg("values"));
}

}  // namespace roundpipe::python
