#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include <roundpipe/saving/state_value.h>

#include "bindings.h"

namespace roundpipe::python {

// A value that an encoder has made, which Python hands on without looking into it.
struct EncodedValue {
  nlohmann::ordered_json json;
};

// A user's value as checkpoints hold it, without pickle. Throws std::invalid_argument, with `path` and the place within
// the value, for what they cannot hold. REQUIRES: the interpreter lock, here and below.
StateValue state_value(const pybind11::handle& value, const std::string& path);
// The same value again. Throws what Python raises for keys and arrays that it cannot have.
pybind11::object python_value(const StateValue& value);

// JSON of None, booleans, numbers, strings, lists, dictionaries by strings, and encoded values.
nlohmann::ordered_json json_of(const pybind11::handle& value);

}  // namespace roundpipe::python
