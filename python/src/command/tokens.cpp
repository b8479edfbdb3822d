#include <roundpipe/tokens/packing.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using namespace tokens;

void bind_tokens(py::module_& module) {
  using Released = py::call_guard<py::gil_scoped_release>;
  module.def("assign_rows", &assign_rows, py::arg("lengths"), py::arg("capacity"), Released());
}

}  // namespace roundpipe::python
