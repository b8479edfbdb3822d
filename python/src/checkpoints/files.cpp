#include <roundpipe/core/frontend.h>
#include <roundpipe/files/crc32c.h>
#include <roundpipe/files/manifest.h>
#include <roundpipe/files/safetensors.h>
#include <roundpipe/files/verify.h>

#include "bindings.h"
#include "python_values.h"

namespace roundpipe::python {

namespace py = pybind11;
using namespace files;  // NOLINT: this file binds this namespace

namespace {

void bind_manifest(py::module_& module) {
  ValueClass<FileRecord>(module, "FileRecord")
      .attribute("name", &FileRecord::name)
      .attribute("bytes", &FileRecord::bytes)
      .attribute("crc32c", &FileRecord::crc32c);
  ValueClass<Manifest>(module, "Manifest")
      .attribute("step", &Manifest::step)
      .attribute("files", &Manifest::files)
      .attribute("writer", &Manifest::writer)
      .attribute("nodes", &Manifest::nodes)
      .attribute("format", &Manifest::format);
  module.def(
      "read_manifest", [](const std::string& folder) { return read_manifest(folder); }, py::arg("folder"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "parse_manifest", [](const std::string& text, const std::string& where) { return parse_manifest(text, where); },
      py::arg("text"), py::arg("where"), py::call_guard<py::gil_scoped_release>());
}

void bind_safetensors(py::module_& module) {
  ValueClass<TensorEntry>(module, "TensorEntry")
      .attribute("name", &TensorEntry::name)
      .attribute("dtype", &TensorEntry::dtype)
      .attribute("shape", &TensorEntry::shape)
      .attribute("offset", &TensorEntry::offset)
      .attribute("bytes", &TensorEntry::bytes);
  ValueClass<SafetensorsHeader>(module, "SafetensorsHeader")
      .attribute("tensors", &SafetensorsHeader::tensors)
      .attribute("metadata", &SafetensorsHeader::metadata);
  module.def(
      "read_safetensors_header", [](const std::string& path) { return read_safetensors_header(path); }, py::arg("path"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "parse_safetensors_header",
      [](const std::string& start, int64_t file_bytes, const std::string& where) {
        return parse_safetensors_header(start, file_bytes, where);
      },
      py::arg("start"), py::arg("file_bytes"), py::arg("where"), py::call_guard<py::gil_scoped_release>());
}

void bind_verify(py::module_& module) {
  ValueClass<FileProblem>(module, "FileProblem")
      .attribute("file", &FileProblem::file)
      .attribute("problem", &FileProblem::problem);
  module.def(
      "verify_step",
      [](const std::string& folder, int threads, const std::optional<py::function>& progress) {
        VerifyOptions options{.threads = threads};
        options.progress = [&](int64_t done_bytes, int64_t total_bytes) {
          frontend().check_interrupt();
          if (!progress) return;
          in_python([&] { (*progress)(done_bytes, total_bytes); });
        };
        const py::gil_scoped_release unlocked;
        return verify_step(folder, options);
      },
      py::arg("folder"), py::arg("threads") = VerifyOptions{}.threads, py::arg("progress") = py::none());
}

}  // namespace

void bind_checkpoint_files(py::module_& module) {
  bind_manifest(module);
  bind_safetensors(module);
  bind_verify(module);
  module.def(
      "crc32c",
      [](const py::bytes& data, uint32_t seed) {
        const std::string_view view = data;
        const py::gil_scoped_release released;
        return crc32c(view.data(), view.size(), seed);
      },
      py::arg("data"), py::arg("seed") = 0);
}

}  // namespace roundpipe::python
