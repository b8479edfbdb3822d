#include "python_frontend.h"

#include <torch/csrc/Exceptions.h>

#include "bindings.h"
#include "interpreter_lock.h"

namespace roundpipe::python {

namespace py = pybind11;

namespace {

// Keeps an interpreter state for the thread while it lives, without holding the lock.
struct InterpreterState {
  const InterpreterLock state;
  const py::gil_scoped_release unlocked;
};

}  // namespace

py::object exception_object(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (python_error& raised) {
    raised.restore();
  } catch (...) {
    torch::translate_exception_to_python(error);
  }
  const py::error_already_set fetched;
  py::object value = fetched.value();
  if (fetched.trace()) PyException_SetTraceback(value.ptr(), fetched.trace().ptr());
  return value;
}

std::shared_ptr<void> PythonFrontend::attach_thread() { return std::make_shared<InterpreterState>(); }

void PythonFrontend::check_interrupt() {
  if (Py_IsInitialized() == 0) return;
  const InterpreterLock lock(InterpreterLock::Purpose::kSignals);
  if (PyErr_CheckSignals() == 0) return;
  py::error_already_set raised;
  throw_python_error(raised);
}

void PythonFrontend::call_over(uint64_t call) {
  if (!saved_by_call_ || Py_IsInitialized() == 0) return;
  const InterpreterLock lock;
  object_of(saved_by_call_).attr("pop")(call, py::none());
}

bool PythonFrontend::is_out_of_memory(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (python_error& raised) {
    const InterpreterLock lock;
    const py::object expected = py::module_::import("torch").attr("OutOfMemoryError");
    return PyErr_GivenExceptionMatches(raised.type, expected.ptr()) != 0;
  } catch (...) {
    return false;
  }
}

void PythonFrontend::clear_error() {
  const InterpreterLock lock;
  PyErr_Clear();
}

bool PythonFrontend::is_interrupt(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (python_error& raised) {
    const InterpreterLock lock;
    return PyErr_GivenExceptionMatches(raised.type, PyExc_Exception) == 0;
  } catch (...) {
    return false;
  }
}

std::string PythonFrontend::said(const std::exception& error) {
  const auto* const raised = dynamic_cast<const python_error*>(&error);
  if (raised == nullptr) return Frontend::said(error);
  const InterpreterLock lock;
  return py::handle(raised->type).attr("__name__").cast<std::string>() + ": " + Frontend::said(error);
}

void PythonFrontend::release_values(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (python_error& raised) {
    const InterpreterLock lock;
    if (raised.traceback == nullptr) return;
    py::module_::import("traceback").attr("clear_frames")(py::handle(raised.traceback));
  } catch (...) {
  }
}

std::shared_ptr<void> PythonFrontend::without_collection() {
  const InterpreterLock lock;
  if (PyGC_Disable() == 0) return nullptr;
  return {static_cast<void*>(nullptr), [](void*) {
            const InterpreterLock again;
            PyGC_Enable();
          }};
}

std::string PythonFrontend::quoted(const std::string& text) { return "'" + text + "'"; }

std::string PythonFrontend::option(const std::string& name, const std::string& value) {
  const bool is_number = value.find_first_not_of("0123456789") == std::string::npos;
  return (name == "microbatches" ? "num_microbatch" : name) + "=" + (is_number ? value : quoted(value));
}

std::exception_ptr PythonFrontend::explain(const std::exception_ptr& error, const std::string& lines) {
  const InterpreterLock lock;
  try {
    const py::object told =
        py::module_::import("roundpipe.model.memory.out_of_memory").attr("said")(exception_object(error), lines);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(told.ptr())), told.ptr());
    python_error thrown;
    thrown.persist();
    return std::make_exception_ptr(thrown);
  } catch (py::error_already_set& raised) {
    throw_python_error(raised);
  }
}

bool PythonFrontend::warn(const std::string& notice) {
  const InterpreterLock lock;
  try {
    py::module_::import("roundpipe.model.memory.out_of_memory").attr("warn")(notice);
    return true;
  } catch (py::error_already_set& raised) {
    throw_python_error(raised);
  }
}

void PythonFrontend::raise(const Error& error) {
  const InterpreterLock lock;
  PyErr_SetString(py::module_::import("roundpipe._core").attr("RoundPipeError").ptr(), error.what());
  py::error_already_set raised;
  throw_python_error(raised);
}

void bind_frontend(py::module_& module) {
  auto made = std::make_unique<PythonFrontend>();
  PythonFrontend* const frontend = made.get();
  set_frontend(std::move(made));
  module.def(
      "set_saved_by_call", [frontend](py::dict saved) { frontend->set_saved_by_call(share(std::move(saved))); },
      py::arg("saved"));
}

}  // namespace roundpipe::python
