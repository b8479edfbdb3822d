#include <pybind11/functional.h>

#include <roundpipe/ops/projection.h>
#include <roundpipe/quantise/encoded_tensor.h>
#include <roundpipe/quantise/module_names.h>
#include <roundpipe/quantise/quantised_folder.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using quantise::EncodedTensor;
using quantise::Encoding;
using quantise::Format;
using quantise::StoredWeight;

namespace {

Encoding make_encoding(const std::string& format, c10::ScalarType dtype, bool transposed) {
  return {&quantise::find_format(format), dtype, transposed};
}

std::vector<std::pair<c10::ScalarType, std::vector<int64_t>>> shapes_of(const std::vector<quantise::Part>& parts) {
  std::vector<std::pair<c10::ScalarType, std::vector<int64_t>>> shapes;
  for (const quantise::Part& part : parts) shapes.emplace_back(part.dtype, part.sizes);
  return shapes;
}

}  // namespace

void bind_quantise(py::module_& module) {
  module.def("format_names", &quantise::format_names);
  module.def("check_format", [](const std::string& name) { quantise::find_format(name); }, py::arg("name"));
  module.def("is_name_of", &quantise::is_name_of, py::arg("name"), py::arg("path"));
  module.def("require_modules", &quantise::require_modules, py::arg("names"), py::arg("paths"));
  module.def(
      "reason_against_format",
      [](const std::string& format, const std::vector<int64_t>& sizes) {
        return quantise::find_format(format).reason_against(sizes);
      },
      py::arg("format"), py::arg("sizes"));
  module.def(
      "encode",
      [](const std::string& format, const at::Tensor& numbers) {
        return quantise::find_format(format).encode(numbers);
      },
      py::arg("format"), py::arg("numbers"), py::call_guard<py::gil_scoped_release>());
  py::class_<Encoding>(module, "Encoding")
      .def(py::init(&make_encoding), py::arg("format"), py::arg("dtype"), py::arg("transposed") = false)
      .def_property_readonly("format", [](const Encoding& encoding) { return std::string(encoding.format->name()); })
      .def_readonly("dtype", &Encoding::dtype)
      .def_readonly("transposed", &Encoding::transposed)
      .def_property_readonly("suffixes", [](const Encoding& encoding) { return encoding.format->suffixes(); })
      .def(
          "part_shapes",
          [](const Encoding& encoding, const std::vector<int64_t>& sizes) { return shapes_of(encoding.parts(sizes)); },
          py::arg("sizes"))
      .def(
          "sizes",
          [](const Encoding& encoding, const std::vector<at::Tensor>& parts) {
            return EncodedTensor(encoding, parts).sizes();
          },
          py::arg("parts"))
      .def(
          "values",
          [](const Encoding& encoding, const std::vector<at::Tensor>& parts) {
            return EncodedTensor(encoding, parts).values();
          },
          py::arg("parts"), py::call_guard<py::gil_scoped_release>())
      .def(
          "matrix",
          [](const Encoding& encoding, const std::vector<at::Tensor>& parts, int64_t index) {
            return EncodedTensor(encoding, parts).select({index})[0].values();
          },
          py::arg("parts"), py::arg("index"), py::call_guard<py::gil_scoped_release>())
      .def(
          "linear",
          [](const Encoding& encoding, const at::Tensor& input, const std::vector<at::Tensor>& parts,
             const std::optional<at::Tensor>& bias) {
            return ops::encoded_linear(input, EncodedTensor(encoding, parts), bias);
          },
          py::arg("input"), py::arg("parts"), py::arg("bias"), py::call_guard<py::gil_scoped_release>())
      .def("of_stack", &Encoding::of_stack, py::arg("numbers"))
      .def(
          "flat",
          [](const Encoding& encoding, const std::vector<at::Tensor>& parts) {
            return encoding.format->flat(parts).second;
          },
          py::arg("parts"), py::call_guard<py::gil_scoped_release>())
      .def("__eq__",
           [](const Encoding& one, const py::object& other) {
             if (!py::isinstance<Encoding>(other)) return false;
             const auto& its = other.cast<const Encoding&>();
             return one.format == its.format && one.dtype == its.dtype && one.transposed == its.transposed;
           })
      .def("__hash__",
           [](const Encoding& encoding) {
             return py::hash(py::make_tuple(std::string(encoding.format->name()), encoding.dtype, encoding.transposed));
           })
      .def("__repr__",
           [](const Encoding& encoding) {
             return std::string(encoding.format->name()) + " of " + c10::toString(encoding.dtype);
           })
      .def(py::pickle(
          [](const Encoding& encoding) {
            return std::make_tuple(std::string(encoding.format->name()), encoding.dtype, encoding.transposed);
          },
          [](const std::tuple<std::string, c10::ScalarType, bool>& state) {
            return std::apply(make_encoding, state);
          }));
  py::class_<StoredWeight>(module, "StoredWeight")
      .def_property_readonly("sizes", &StoredWeight::sizes)
      .def_property_readonly("tensors", &StoredWeight::tensors)
      .def_property_readonly("stored_parts",
                             [](const StoredWeight& weight) {
                               std::vector<std::string> names;
                               for (const auto& stored : weight.stored_parts()) names.push_back(stored.tensor);
                               return names;
                             })
      .def_property_readonly("part_shapes", [](const StoredWeight& weight) { return shapes_of(weight.parts()); })
      .def("encoding", &StoredWeight::encoding, py::arg("dtype"))
      .def("part", &StoredWeight::part, py::arg("index"), py::arg("read"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "find_stored_weights",
      [](const std::string& config,
         const std::vector<std::tuple<std::string, std::string, std::vector<int64_t>, int64_t>>& tensors,
         const std::function<at::Tensor(const std::string&)>& read) {
        std::vector<files::TensorEntry> entries;
        for (const auto& [name, dtype, shape, bytes] : tensors) {
          entries.push_back({.name = name, .dtype = dtype, .shape = shape, .bytes = bytes});
        }
        return quantise::find_stored_weights(config, entries, read);
      },
      py::arg("config"), py::arg("tensors"), py::arg("read"));
  module.def(
      "stored_tensors",
      [](const std::string& name, const Encoding& encoding, const std::vector<at::Tensor>& parts) {
        return quantise::stored_tensors(name, EncodedTensor(encoding, parts));
      },
      py::arg("name"), py::arg("encoding"), py::arg("parts"));
  module.def(
      "stored_config",
      [](const std::string& format, c10::ScalarType dtype, const std::vector<std::string>& kept) {
        return quantise::stored_config(quantise::find_format(format), dtype, kept);
      },
      py::arg("format"), py::arg("dtype"), py::arg("kept"));
}

}  // namespace roundpipe::python
