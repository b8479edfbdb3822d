#include <torch/csrc/Exceptions.h>

#include <roundpipe/core/error.h>
#include <roundpipe/device/event.h>
#include <roundpipe/runtime/out_of_memory.h>
#include <roundpipe/runtime/worker.h>
#include <roundpipe/schedule/search.h>

#include "bindings.h"
#include "interpreter_lock.h"
#include "python_values.h"

namespace roundpipe::python {

namespace py = pybind11;

namespace {

// Keeps an interpreter state for the thread while it lives, without holding the lock.
struct InterpreterState {
  const InterpreterLock state;
  const py::gil_scoped_release unlocked;
};

// The exception object that a Python program sees for `error`. REQUIRES: the interpreter lock.
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

// See ErrorHooks::explain: the step is a function of the exception, the description and the cap, that returns another.
std::exception_ptr explain(const std::exception_ptr& error, const runtime::FullDevice& full,
                           const std::shared_ptr<const void>& step) {
  const InterpreterLock lock;
  try {
    const py::object raised = exception_object(error);
    const py::object told =
        step ? object_of(step)(raised, runtime::describe(full), full.limit_bytes)
             : py::module_::import("roundpipe.memory.out_of_memory").attr("said")(raised, runtime::describe(full));
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(told.ptr())), told.ptr());
    python_error thrown;
    thrown.persist();
    return std::make_exception_ptr(thrown);
  } catch (py::error_already_set& raised) {
    throw_python_error(raised);
  }
}

}  // namespace

void bind_errors(py::module_& module) {
  py::register_exception<Error>(module, "RoundPipeError", PyExc_RuntimeError).doc() =
      "Something failed that is not the caller's mistake (those are ValueError).";
  py::register_exception<schedule::LayerTooLarge>(module, "LayerTooLargeError", PyExc_ValueError);
  // torch's exceptions keep their Python types (OutOfMemoryError, IndexError, ...).
  py::register_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const c10::Error&) {
      torch::translate_exception_to_python(error);
    } catch (python_error& raised) {
      raised.restore();
    }
  });
  runtime::set_thread_attach([]() -> std::shared_ptr<void> { return std::make_shared<InterpreterState>(); });
  runtime::ErrorHooks hooks;
  hooks.is_out_of_memory = [](const std::exception_ptr& error) {
    try {
      std::rethrow_exception(error);
    } catch (python_error& raised) {
      const InterpreterLock lock;
      const py::object expected = py::module_::import("torch").attr("OutOfMemoryError");
      return PyErr_GivenExceptionMatches(raised.type, expected.ptr()) != 0;
    } catch (...) {
      return false;
    }
  };
  hooks.clear = [] {
    const InterpreterLock lock;
    PyErr_Clear();
  };
  hooks.explain = explain;
  hooks.warn = [](const std::string& notice) {
    const InterpreterLock lock;
    try {
      py::module_::import("roundpipe.memory.out_of_memory").attr("warn")(notice);
    } catch (py::error_already_set& raised) {
      throw_python_error(raised);
    }
  };
  hooks.raise = [](const Error& error) {
    const InterpreterLock lock;
    PyErr_SetString(py::module_::import("roundpipe._core").attr("RoundPipeError").ptr(), error.what());
    py::error_already_set raised;
    throw_python_error(raised);
  };
  runtime::set_error_hooks(std::move(hooks));
  device::set_interrupt_check([] {
    if (Py_IsInitialized() == 0) return;
    const InterpreterLock lock;
    if (PyErr_CheckSignals() == 0) return;
    py::error_already_set raised;
    throw_python_error(raised);
  });
}

}  // namespace roundpipe::python
