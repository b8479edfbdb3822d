#include <roundpipe/runtime/call/batch_cut.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using namespace runtime;

void bind_microbatches(py::module_& module) {
  py::class_<Cut>(module, "Cut")
      .def(py::init<>())
      .def_static("along", &Cut::along, py::arg("dimension"))
      .def_static("whole", &Cut::whole);
  py::enum_<BatchLeaf::Role>(module, "BatchRole")
      .value("ARGUMENT", BatchLeaf::Role::kArgument)
      .value("KEYWORD", BatchLeaf::Role::kKeyword)
      .value("LABEL", BatchLeaf::Role::kLabel);
  py::class_<BatchLeaf>(module, "BatchLeaf")
      .def(py::init([](std::string name, std::vector<int64_t> shape, const Cut& cut, BatchLeaf::Role role, int ready,
                       std::vector<int64_t> ready_rows, int64_t numbers) {
             return BatchLeaf{std::move(name), std::move(shape), cut, role, ready, std::move(ready_rows), numbers};
           }),
           py::arg("name"), py::arg("shape") = std::vector<int64_t>{}, py::arg("cut") = Cut{},
           py::arg("role") = BatchLeaf::Role::kArgument, py::arg("ready") = 0,
           py::arg("ready_rows") = std::vector<int64_t>{}, py::arg("numbers") = 0);
  ValueClass<LeafCut>(module, "LeafCut")
      .attribute("dimension", &LeafCut::dimension)
      .attribute("sizes", &LeafCut::sizes);
  py::class_<InputCut>(module, "InputCut")
      .def(py::init<std::vector<BatchLeaf>>(), py::arg("leaves"))
      .def("count", &InputCut::count, py::arg("wanted"), py::arg("by_default"))
      .def("cut", &InputCut::cut, py::arg("count"))
      .def("rows", &InputCut::rows, py::arg("count"))
      .def("doubts", &InputCut::doubts);
  module.def("rows_of", &rows_of, py::arg("microbatches"));
  module.def("cut_labels", &cut_labels, py::arg("labels"), py::arg("rows"), py::arg("count"));
}

}  // namespace roundpipe::python
