#pragma once

#include <memory>
#include <optional>
#include <utility>

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

// Calls Python under the interpreter lock, and throws what it raises in torch's form: whoever handles errors knows that
// one alone.
template <typename Call>
auto in_python(Call&& call) {
  const InterpreterLock lock;
  try {
    return call();
  } catch (pybind11::error_already_set& raised) {
    throw_python_error(raised);
  }
}

class Passage;

// What Values::structure points at in this module: a Python structure.
struct PythonStructure {
  SharedObject object;
  std::optional<size_t> after;  // `object` is a function that makes the structure from this number
  // How the native layers that take these values are called; null: none of them can. Owned by `owner`, or by what owns
  // this.
  const Passage* passage = nullptr;
  std::shared_ptr<const Passage> owner;
};

inline const PythonStructure* structure_of(const runtime::Values& values) {
  return static_cast<const PythonStructure*>(values.structure.get());
}

// The Python structure of values, None if there is none. REQUIRES: the interpreter lock.
inline pybind11::object structure_object(const runtime::Values& values) {
  const PythonStructure* const structure = structure_of(values);
  if (structure == nullptr) return pybind11::none();
  return structure->after ? object_of(structure->object)(*structure->after) : object_of(structure->object);
}

inline std::shared_ptr<const void> make_structure(pybind11::object object,
                                                  std::shared_ptr<const Passage> passage = nullptr) {
  const Passage* const seen = passage.get();
  return std::make_shared<const PythonStructure>(
      PythonStructure{share(std::move(object)), std::nullopt, seen, std::move(passage)});
}

// Converts (tensors, structure) to values, and back. REQUIRES: the interpreter lock.
inline runtime::Values values_from(const pybind11::handle& pair, std::shared_ptr<const Passage> passage = nullptr) {
  const auto tuple = pair.cast<pybind11::tuple>();
  runtime::Values values;
  values.tensors = tuple[0].cast<std::vector<at::Tensor>>();
  values.structure = make_structure(pybind11::reinterpret_borrow<pybind11::object>(tuple[1]), std::move(passage));
  return values;
}

inline pybind11::tuple values_to(const runtime::Values& values) {
  return pybind11::make_tuple(values.tensors, structure_object(values));
}

}  // namespace roundpipe::python
