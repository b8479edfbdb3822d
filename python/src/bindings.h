#pragma once

#include <torch/csrc/utils/pybind.h>

namespace roundpipe::python {

void bind_errors(pybind11::module_& module);
void bind_frontend(pybind11::module_& module);
void bind_device(pybind11::module_& module);
void bind_memory(pybind11::module_& module);
void bind_modules(pybind11::module_& module);
void bind_model_optimizer(pybind11::module_& module);
void bind_ops(pybind11::module_& module);
void bind_optim(pybind11::module_& module);
void bind_pipeline(pybind11::module_& module);
void bind_random(pybind11::module_& module);
void bind_schedule(pybind11::module_& module);

}  // namespace roundpipe::python
