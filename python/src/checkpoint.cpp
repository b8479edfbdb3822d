#include <optional>

#include <roundpipe/checkpoint/crc32c.h>
#include <roundpipe/checkpoint/manifest.h>
#include <roundpipe/checkpoint/run_folder.h>
#include <roundpipe/checkpoint/safetensors.h>
#include <roundpipe/checkpoint/steps.h>
#include <roundpipe/checkpoint/verify.h>
#include <roundpipe/saving/tensor_files.h>

#include <pybind11/functional.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using namespace checkpoint;

void bind_checkpoint(py::module_& module) {
  ValueClass<FileRecord>(module, "FileRecord")
      .attribute("name", &FileRecord::name)
      .attribute("bytes", &FileRecord::bytes)
      .attribute("crc32c", &FileRecord::crc32c);
  ValueClass<Manifest>(module, "Manifest")
      .attribute("step", &Manifest::step)
      .attribute("files", &Manifest::files)
      .attribute("writer", &Manifest::writer)
      .attribute("format", &Manifest::format);
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
      py::arg("tensors"), py::arg("metadata"));

  py::class_<OutputFile>(module, "OutputFile")
      .def_property_readonly("name", &OutputFile::name)
      .def(
          "write_at",
          [](OutputFile& file, int64_t offset, const py::bytes& data) {
            const std::string_view view = data;
            const py::gil_scoped_release no_gil;
            file.write_at(offset, view.data(), static_cast<int64_t>(view.size()));
          },
          py::arg("offset"), py::arg("data"));
  py::class_<StepWriter>(module, "StepWriter")
      .def("create", &StepWriter::create, py::arg("name"), py::arg("bytes"),
           py::return_value_policy::reference_internal, py::call_guard<py::gil_scoped_release>())
      .def("add_small", &StepWriter::add_small, py::arg("name"), py::arg("contents"),
           py::call_guard<py::gil_scoped_release>())
      .def("commit", &StepWriter::commit, py::arg("writer"), py::call_guard<py::gil_scoped_release>());
  py::class_<RunFolder>(module, "RunFolder")
      .def(py::init<const std::string&>(), py::arg("folder"))
      .def_property_readonly("path", &RunFolder::path)
      .def_property_readonly("notices", &RunFolder::notices)
      .def(
          "begin",
          [](RunFolder& run, int64_t step, int64_t total_bytes, bool replace) {
            return run.begin(step, {total_bytes, replace});
          },
          py::arg("step"), py::arg("total_bytes"), py::arg("replace"), py::call_guard<py::gil_scoped_release>())
      .def(
          "prune",
          [](RunFolder& run, int64_t keep_last, int64_t keep_every) { return run.prune({keep_last, keep_every}); },
          py::arg("keep_last"), py::arg("keep_every"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "crc32c",
      [](const py::bytes& data) {
        const std::string_view view = data;
        return crc32c(view.data(), view.size());
      },
      py::arg("data"));
  module.def(
      "latest_step", [](const std::string& folder) { return latest_step(folder); }, py::arg("folder"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "complete_steps", [](const std::string& folder) { return complete_steps(folder); }, py::arg("folder"),
      py::call_guard<py::gil_scoped_release>());
  ValueClass<FileProblem>(module, "FileProblem")
      .attribute("file", &FileProblem::file)
      .attribute("problem", &FileProblem::problem);
  module.def(
      "verify_step",
      [](const std::string& folder, const std::optional<std::function<void(int64_t, int64_t)>>& progress) {
        VerifyOptions options;
        if (progress) options.progress = *progress;
        const py::gil_scoped_release no_gil;
        return verify_step(folder, options);
      },
      py::arg("folder"), py::arg("progress"));
  module.def(
      "require_complete", [](const std::string& folder) { return require_complete(folder); }, py::arg("folder"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace roundpipe::python
