#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;

namespace {

// Whether two dicts hold identical objects under identical keys, in the same order.
bool same_items(PyObject* a, PyObject* b) {
  if (PyDict_Size(a) != PyDict_Size(b)) return false;
  Py_ssize_t place_a = 0;
  Py_ssize_t place_b = 0;
  PyObject* keys[2];
  PyObject* values[2];
  while (PyDict_Next(a, &place_a, &keys[0], &values[0]) != 0) {
    if (PyDict_Next(b, &place_b, &keys[1], &values[1]) == 0 || keys[0] != keys[1] || values[0] != values[1]) {
      return false;
    }
  }
  return true;
}

// `snapshots[i]` is (copy of the module's __dict__, one of its dicts, copy of that dict, the next dict, ...).
bool modules_unchanged(const py::list& modules, const py::list& snapshots) {
  const auto count = static_cast<Py_ssize_t>(modules.size());
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* const snapshot = PyList_GET_ITEM(snapshots.ptr(), i);
    const auto attributes =
        py::reinterpret_steal<py::object>(PyObject_GenericGetDict(PyList_GET_ITEM(modules.ptr(), i), nullptr));
    if (!attributes) throw py::error_already_set();
    if (!same_items(attributes.ptr(), PyTuple_GET_ITEM(snapshot, 0))) return false;
    for (Py_ssize_t part = 1; part + 1 < PyTuple_GET_SIZE(snapshot); part += 2) {
      if (!same_items(PyTuple_GET_ITEM(snapshot, part), PyTuple_GET_ITEM(snapshot, part + 1))) return false;
    }
  }
  return true;
}

}  // namespace

void bind_modules(py::module_& module) {
  module.def(
      "same_items", [](const py::dict& a, const py::dict& b) { return same_items(a.ptr(), b.ptr()); }, py::arg("a"),
      py::arg("b"));
  module.def("modules_unchanged", &modules_unchanged, py::arg("modules"), py::arg("snapshots"));
}

}  // namespace roundpipe::python
