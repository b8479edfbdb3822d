#pragma once

#include <memory>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

#include <roundpipe/runtime/model/layer.h>

#include "interpreter_lock.h"

namespace roundpipe::python {

// A Python object that C++ threads may drop without holding the interpreter lock.
using SharedObject = std::shared_ptr<const void>;

inline SharedObject share(pybind11::object object) {
  PyObject* pointer = object.release().ptr();
  return {pointer, [](const void* dropped) {
            // After finalization, the object is gone with the interpreter.
            if (Py_IsInitialized() == 0) return;
            const InterpreterLock lock;
            Py_DECREF(static_cast<PyObject*>(const_cast<void*>(dropped)));
          }};
}

// Returns the object inside, or None if there is none. REQUIRES: the interpreter lock.
inline pybind11::object object_of(const SharedObject& shared) {
  if (!shared) return pybind11::none();
  return pybind11::reinterpret_borrow<pybind11::object>(static_cast<PyObject*>(const_cast<void*>(shared.get())));
}

// Throws torch's form of a Python exception. Unlike pybind11's, it can be thrown more than once, and passes an autograd
// backward with its type and traceback. REQUIRES: the interpreter lock.
[[noreturn]] inline void throw_python_error(pybind11::error_already_set& raised) {
  raised.restore();
  python_error error;
  error.persist();
  throw error;
}

// Converts (tensors, structure) to values, and back. REQUIRES: the interpreter lock.
inline runtime::Values values_from(const pybind11::handle& pair) {
  const auto tuple = pair.cast<pybind11::tuple>();
  runtime::Values values;
  values.tensors = tuple[0].cast<std::vector<at::Tensor>>();
  values.structure = share(pybind11::reinterpret_borrow<pybind11::object>(tuple[1]));
  return values;
}

inline pybind11::tuple values_to(const runtime::Values& values) {
  return pybind11::make_tuple(values.tensors, object_of(values.structure));
}

}  // namespace roundpipe::python
