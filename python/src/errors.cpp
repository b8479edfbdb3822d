#include <torch/csrc/Exceptions.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/loss_check.h>
#include <roundpipe/files/damage.h>
#include <roundpipe/schedule/search.h>
#include <roundpipe/training/host_memory.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;

void bind_errors(py::module_& module) {
  py::register_exception<Error>(module, "RoundPipeError", PyExc_RuntimeError).doc() =
      "Something failed that is not the caller's mistake (those are ValueError).";
  py::register_exception<files::DamagedCheckpoint>(module, "DamagedCheckpointError", module.attr("RoundPipeError"))
      .doc() = "A checkpoint cannot be used as the disk has it; the message names a file.";
  py::register_exception<schedule::LayerTooLarge>(module, "LayerTooLargeError", PyExc_ValueError);
  py::register_exception<schedule::HostTooSmall>(module, "HostTooSmallError", PyExc_ValueError);
  py::register_exception<BudgetExceeded>(module, "BudgetError", PyExc_ValueError).doc() =
      "A model or a step does not fit its budget.";
  module.def("checks_losses", &checks_losses);
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
}

}  // namespace roundpipe::python
