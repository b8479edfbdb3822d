#include "state_values.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include <ATen/ops/empty.h>

#include <roundpipe/core/error.h>
#include <roundpipe/saving/state_encoding.h>

namespace roundpipe::python {

namespace py = pybind11;

namespace {

std::string type_name(const py::handle& value, bool with_module) {
  const py::handle type = py::type::handle_of(value);
  const std::string name = py::str(type.attr(with_module ? "__qualname__" : "__name__"));
  return with_module ? concat(std::string(py::str(type.attr("__module__"))), ".", name) : name;
}

// Reads a user's value. One for each value.
class Reader {
 public:
  StateValue read(const py::handle& value, const std::string& path) {
    PyObject* const object = value.ptr();
    if (value.is_none()) return {};
    if (PyBool_Check(object)) return value.ptr() == Py_True;
    if (PyUnicode_CheckExact(object)) return text(object, path);
    if (PyLong_CheckExact(object)) return integer(object);
    if (PyFloat_CheckExact(object)) return PyFloat_AS_DOUBLE(object);
    if (PyBytes_CheckExact(object)) return StateValue::Bytes{value.cast<std::string>()};
    if (is_one_of(object, tensors_)) return value.cast<at::Tensor>();
    const bool contains_itself = std::ranges::find(outer_, object) != outer_.end();
    require_shallow(static_cast<int>(outer_.size()), contains_itself, path);
    outer_.push_back(object);
    StateValue made = group(value, path);
    outer_.pop_back();
    return made;
  }

 private:
  static bool is_one_of(PyObject* object, const std::vector<py::object>& types) {
    return std::ranges::any_of(
        types, [&](const py::object& type) { return reinterpret_cast<PyObject*>(Py_TYPE(object)) == type.ptr(); });
  }

  static StateValue text(PyObject* object, const std::string& path) {
    Py_ssize_t size = 0;
    const char* const data = PyUnicode_AsUTF8AndSize(object, &size);
    if (data != nullptr) return std::string(data, static_cast<size_t>(size));
    PyErr_Clear();  // lone surrogates, as names of files that are not UTF-8 have
    throw std::invalid_argument(concat("[save_checkpoint] ", path,
                                       " is no text in UTF-8, expected one; give it as bytes, such as "
                                       "os.fsencode(name)"));
  }

  static StateValue integer(PyObject* object) {
    int overflows = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(object, &overflows);
    if (overflows == 0) return number;
    return StateValue::LargeInt{std::string(py::str(py::handle(object)))};
  }

  StateValue::List items(const py::handle& value, const std::string& path) {
    StateValue::List list;
    size_t index = 0;
    for (const py::handle item : value) list.push_back(read(item, path + "[" + std::to_string(index++) + "]"));
    return list;
  }

  StateValue group(const py::handle& value, const std::string& path) {
    if (PyList_CheckExact(value.ptr())) return items(value, path);
    if (is_one_of(value.ptr(), tuples_)) return StateValue::Tuple{items(value, path)};
    if (is_one_of(value.ptr(), dicts_)) return dict(value, path);
    return array(value, path);
  }

  StateValue dict(const py::handle& value, const std::string& path) {
    StateValue::Dict entries;
    for (const py::handle pair : value.attr("items")()) {
      const py::object key = pair[py::int_(0)];
      StateValue name = read_key(key, path);
      const std::string inner = path + "." + text_of_key(name);
      entries.emplace_back(std::move(name), read(py::object(pair[py::int_(1)]), inner));
    }
    return entries;
  }

  StateValue read_key(const py::handle& key, const std::string& path) {
    PyObject* const object = key.ptr();
    const bool is_plain = key.is_none() || PyBool_Check(object) || PyUnicode_CheckExact(object) ||
                          PyLong_CheckExact(object) || PyFloat_CheckExact(object) || PyTuple_CheckExact(object);
    if (!is_plain) {
      throw std::invalid_argument(concat("[save_checkpoint] ", path, " has a key of type ", type_name(key, false),
                                         ", expected str, int, float, bool, None or a tuple of these; change the key"));
    }
    return read(key, path + "'s key " + std::string(py::repr(key)));
  }

  StateValue array(const py::handle& value, const std::string& path) {
    const bool is_array = !numpy_.is_none() && py::type::handle_of(value).is(numpy_.attr("ndarray"));
    const bool is_number = !numpy_.is_none() && py::isinstance(value, numpy_.attr("generic"));
    const std::string kinds = "biufc";
    if ((!is_array && !is_number) ||
        kinds.find(value.attr("dtype").attr("kind").cast<std::string>()) == std::string::npos) {
      throw std::invalid_argument(
          concat("[save_checkpoint] ", path, " is a ", type_name(value, true),
                 ", expected a tensor, an array, a number, a string, bytes, None, or a list, tuple or dict of these; "
                 "leave it out, or give an object whose state_dict() returns such values"));
    }
    const auto bytes = value.attr("tobytes")().cast<std::string>();
    at::Tensor copied = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    if (!bytes.empty()) std::memcpy(copied.mutable_data_ptr(), bytes.data(), bytes.size());
    return StateValue::Array{copied, value.attr("dtype").attr("str").cast<std::string>(),
                             value.attr("shape").cast<std::vector<int64_t>>(), is_number};
  }

  static py::object imported(const char* name) {
    const py::dict modules = py::module_::import("sys").attr("modules");
    return modules.contains(name) ? py::object(modules[name]) : py::none();
  }

  const py::object torch_ = py::module_::import("torch");
  const py::object collections_ = py::module_::import("collections");
  const py::object numpy_ = imported("numpy");
  const std::vector<py::object> tensors_{torch_.attr("Tensor"), torch_.attr("nn").attr("Parameter")};
  const std::vector<py::object> tuples_{py::type::of(py::tuple()), torch_.attr("Size")};
  const std::vector<py::object> dicts_{py::type::of(py::dict()), collections_.attr("OrderedDict"),
                                       collections_.attr("defaultdict"), collections_.attr("Counter")};
  std::vector<PyObject*> outer_;  // the lists, tuples and dictionaries around
};

py::list python_items(const StateValue::List& items) {
  py::list list;
  for (const StateValue& item : items) list.append(python_value(item));
  return list;
}

py::object python_array(const StateValue::Array& array) {
  const py::module_ numpy = py::module_::import("numpy");
  const at::Tensor dense = array.bytes.contiguous();
  const py::bytes bytes(static_cast<const char*>(dense.const_data_ptr()), dense.nbytes());
  const py::object made = numpy.attr("frombuffer")(bytes, py::arg("dtype") = numpy.attr("dtype")(array.dtype))
                              .attr("reshape")(py::cast(array.shape));
  return array.is_number ? py::object(made[py::tuple()]) : made.attr("copy")();
}

}  // namespace

StateValue state_value(const py::handle& value, const std::string& path) { return Reader().read(value, path); }

py::object python_value(const StateValue& value) {
  const StateValue::Content& content = value.content();
  if (const bool* const flag = std::get_if<bool>(&content)) return py::bool_(*flag);
  if (const int64_t* const number = std::get_if<int64_t>(&content)) return py::int_(*number);
  if (const double* const number = std::get_if<double>(&content)) return py::float_(*number);
  if (const std::string* const text = std::get_if<std::string>(&content)) return py::str(*text);
  if (const auto* const bytes = std::get_if<StateValue::Bytes>(&content)) return py::bytes(bytes->data);
  if (const at::Tensor* const tensor = std::get_if<at::Tensor>(&content)) return py::cast(*tensor);
  if (const auto* const number = std::get_if<StateValue::LargeInt>(&content))
    return py::module_::import("builtins").attr("int")(number->digits);
  if (const auto* const array = std::get_if<StateValue::Array>(&content)) return python_array(*array);
  if (const auto* const list = std::get_if<StateValue::List>(&content)) return python_items(*list);
  if (const auto* const tuple = std::get_if<StateValue::Tuple>(&content)) return py::tuple(python_items(tuple->items));
  if (const auto* const entries = std::get_if<StateValue::Dict>(&content)) {
    py::dict dict;
    for (const auto& [key, item] : *entries) dict[python_value(key)] = python_value(item);
    return dict;
  }
  return py::none();
}

}  // namespace roundpipe::python
