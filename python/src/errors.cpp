#include <torch/csrc/Exceptions.h>

#include <roundpipe/core/error.h>
#include <roundpipe/device/event.h>
#include <roundpipe/runtime/out_of_memory.h>
#include <roundpipe/runtime/worker.h>

#include "bindings.h"
#include "python_values.h"

namespace roundpipe::python {

namespace py = pybind11;

namespace {

// Keeps an interpreter state for the thread while it lives, without holding the lock.
struct InterpreterState {
  const py::gil_scoped_acquire state;
  const py::gil_scoped_release unlocked;
};

}  // namespace

void bind_errors(py::module_& module) {
  py::register_exception<Error>(module, "RoundPipeError", PyExc_RuntimeError).doc() =
      "Something failed that is not the caller's mistake (those are ValueError).";
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
      const py::gil_scoped_acquire gil;
      const py::object expected = py::module_::import("torch").attr("OutOfMemoryError");
      return PyErr_GivenExceptionMatches(raised.type, expected.ptr()) != 0;
    } catch (...) {
      return false;
    }
  };
  hooks.clear = [] {
    const py::gil_scoped_acquire gil;
    PyErr_Clear();
  };
  runtime::set_error_hooks(std::move(hooks));
  device::set_interrupt_check([] {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return;
    py::error_already_set raised;
    throw_python_error(raised);
  });
}

}  // namespace roundpipe::python
