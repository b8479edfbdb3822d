#include <roundpipe/checkpoint/step_writer.h>

#include <roundpipe/checkpoint/safetensors.h>
#include <roundpipe/saving/tensor_files.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using namespace checkpoint;  // NOLINT: this file binds this namespace

void bind_step_writer(py::module_& module) {
  ValueClass<SafetensorsLayout>(module, "SafetensorsLayout")
      .attribute("header", [](const SafetensorsLayout& layout) { return py::bytes(layout.header); })
      .attribute("offsets",
                 [](const SafetensorsLayout& layout) {
                   std::vector<int64_t> offsets;
                   for (const TensorEntry& tensor : layout.tensors) offsets.push_back(tensor.offset);
                   return offsets;
                 })
      .attribute("file_bytes", &SafetensorsLayout::file_bytes);
  module.def(
      "lay_out_safetensors",
      [](const std::vector<std::tuple<std::string, at::ScalarType, std::vector<int64_t>>>& tensors,
         const SafetensorsMetadata& metadata) {
        std::vector<TensorDescription> descriptions;
        for (const auto& [name, dtype, shape] : tensors) {
          descriptions.push_back({name, saving::dtype_name(dtype, "'" + name + "'"), shape});
        }
        return lay_out_safetensors(descriptions, metadata);
      },
      py::arg("tensors"), py::arg("metadata"), py::call_guard<py::gil_scoped_release>());
  py::class_<OutputFile>(module, "OutputFile")
      .def_property_readonly("name", &OutputFile::name)
      .def(
          "write_at",
          [](OutputFile& file, int64_t offset, const py::bytes& data) {
            const std::string_view view = data;
            const py::gil_scoped_release unlocked;
            file.write_at(offset, view.data(), static_cast<int64_t>(view.size()));
          },
          py::arg("offset"), py::arg("data"));
  py::class_<StepFiles>(module, "StepFiles")
      .def(py::init([](const std::string& folder) { return std::make_unique<StepFiles>(folder); }), py::arg("folder"))
      .def("create", &StepFiles::create, py::arg("name"), py::arg("bytes"), py::return_value_policy::reference_internal,
           py::call_guard<py::gil_scoped_release>())
      .def("add_small", &StepFiles::add_small, py::arg("name"), py::arg("contents"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "finish",
          [](StepFiles& files) {
            std::vector<FileRecord> records = files.finish();
            files.sync_names();
            return records;
          },
          py::call_guard<py::gil_scoped_release>());
  py::class_<StepWriter>(module, "StepWriter")
      .def_property_readonly("folder", &StepWriter::folder)
      .def("create", &StepWriter::create, py::arg("name"), py::arg("bytes"),
           py::return_value_policy::reference_internal, py::call_guard<py::gil_scoped_release>())
      .def("add_small", &StepWriter::add_small, py::arg("name"), py::arg("contents"),
           py::call_guard<py::gil_scoped_release>())
      .def(
          "adopt",
          [](StepWriter& writer, const std::vector<std::tuple<std::string, int64_t, uint32_t>>& records,
             const std::string& whose) {
            std::vector<FileRecord> adopted;
            for (const auto& [name, bytes, crc32c] : records) adopted.push_back({name, bytes, crc32c});
            writer.adopt(adopted, whose);
          },
          py::arg("records"), py::arg("whose"), py::call_guard<py::gil_scoped_release>())
      .def("commit", &StepWriter::commit, py::arg("writer"), py::arg("nodes"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("placed", &StepWriter::placed);
  module.def("failed_save_notice", &failed_save_notice, py::arg("step"), py::arg("error"), py::arg("placed"));
}

}  // namespace roundpipe::python
