#pragma once

#include <memory>

#include <torch/csrc/utils/pybind.h>

#include <roundpipe/runtime/model/layer.h>

namespace roundpipe::python {

// A layer written in Python. `object` is a roundpipe.following.layers.shell.PythonLayer: name, parameters(), buffers(),
// mode_key(), attributes() and make_shell(device). The layer and its shells take the interpreter lock for each call.
// REQUIRES: the interpreter lock.
std::unique_ptr<runtime::Layer> make_python_layer(pybind11::object object);

// A loss written in Python: callable(outputs, label, context) over (tensors, structure) pairs -> list of scalars.
std::shared_ptr<runtime::Loss> make_python_loss(pybind11::object object);

}  // namespace roundpipe::python
