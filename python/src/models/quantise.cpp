#include <roundpipe/ops/projection.h>
#include <roundpipe/quantise/encoded_tensor.h>
#include <roundpipe/quantise/module_names.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using quantise::EncodedTensor;
using quantise::Encoding;
using quantise::Format;

namespace {

Encoding make_encoding(const std::string& format, c10::ScalarType dtype, bool transposed) {
  return {&quantise::find_format(format), dtype, transposed};
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
          [](const Encoding& encoding, const std::vector<int64_t>& sizes) {
            std::vector<std::pair<c10::ScalarType, std::vector<int64_t>>> shapes;
            for (const quantise::Part& part : encoding.format->parts(sizes))
              shapes.emplace_back(part.dtype, part.sizes);
            return shapes;
          },
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
}

}  // namespace roundpipe::python
