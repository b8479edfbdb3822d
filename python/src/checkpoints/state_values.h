#pragma once

#include <string>

#include <roundpipe/saving/state_value.h>

#include "bindings.h"

namespace roundpipe::python {

// A user's value as checkpoints hold it, without pickle. Throws std::invalid_argument, with `path` and the place within
// the value, for what they cannot hold. REQUIRES: the interpreter lock, here and below.
StateValue state_value(const pybind11::handle& value, const std::string& path);
// The same value again. Throws what Python raises for keys and arrays that it cannot have.
pybind11::object python_value(const StateValue& value);

}  // namespace roundpipe::python
