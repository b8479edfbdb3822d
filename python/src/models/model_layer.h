#pragma once

#include <memory>

#include <torch/csrc/utils/pybind.h>

#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::python {

// The layer for a roundpipe.following.layers.shell.PythonLayer: a Python layer or, if its `native` is not None, a
// native one that falls back to it. REQUIRES: the interpreter lock.
std::unique_ptr<runtime::Layer> make_model_layer(pybind11::object object);

}  // namespace roundpipe::python
