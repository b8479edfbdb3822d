#include <roundpipe/saving/stored_checkpoint.h>

#include <roundpipe/files/fall_back.h>
#include <roundpipe/runs/run_folders.h>
#include <roundpipe/saving/state_reads.h>

#include "bindings.h"
#include "state_values.h"

namespace roundpipe::python {

namespace py = pybind11;
using files::FallBack;

namespace {

// A FallBack that keeps its lines for who prints them.
struct KeptFallBack {
  explicit KeptFallBack(const std::string& folder)
      : fall_back(folder, [this](const std::string& line) { lines.push_back(line); }) {}

  std::vector<std::string> lines;
  FallBack fall_back;
};

std::pair<std::string, std::vector<std::string>> next(KeptFallBack& kept) {
  kept.lines.clear();
  std::string folder = kept.fall_back.next();
  return {std::move(folder), kept.lines};
}

// The part of a rank's state that lies under `keys`: names of objects, and numbers in lists.
const nlohmann::json& found(const StoredCheckpoint& stored, const py::list& keys, int64_t rank) {
  const nlohmann::json* found = &stored.state(rank);
  for (const py::handle key : keys) {
    const bool is_name = py::isinstance<py::str>(key);
    found = is_name ? &found->at(key.cast<std::string>()) : &found->at(key.cast<size_t>());
  }
  return *found;
}

py::object value(StoredCheckpoint& stored, const py::list& keys, const std::string& path, int64_t rank) {
  const nlohmann::json& encoded = found(stored, keys, rank);
  StateValue decoded;
  {
    const py::gil_scoped_release unlocked;
    decoded = stored.value(encoded, path, rank);
  }
  return python_value(decoded);
}

void bind_reads(py::module_& module) {
  py::class_<StateReads>(module, "StateReads")
      .def(py::init<const StoredCheckpoint&>(), py::arg("stored"), py::keep_alive<1, 2>())
      .def("take", &StateReads::take, py::arg("name"), py::arg("kind"), py::arg("target"), py::arg("like"),
           py::arg("range"), py::call_guard<py::gil_scoped_release>())
      .def(
          "whole",
          [](StateReads& reads, const std::string& name, const std::string& kind, const std::vector<int64_t>& shape) {
            return reads.whole(name, kind, shape);
          },
          py::arg("name"), py::arg("kind"), py::arg("shape"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("whole_tensors", &StateReads::whole_tensors)
      .def("read", &StateReads::read, py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_stored_checkpoint(py::module_& module) {
  constexpr int64_t kOfAll = StoredCheckpoint::kOfAll;
  ValueClass<saving::StoredTensor>(module, "StoredTensor")
      .attribute("file", &saving::StoredTensor::file)
      .attribute("torch_dtype", &saving::StoredTensor::dtype)
      .attribute("shape", [](const saving::StoredTensor& tensor) { return py::tuple(py::cast(tensor.shape)); })
      .attribute("bytes", &saving::StoredTensor::bytes);
  py::class_<StoredCheckpoint>(module, "StoredCheckpoint")
      .def(py::init<const std::string&>(), py::arg("folder"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("manifest", &StoredCheckpoint::manifest)
      .def("state_text", &StoredCheckpoint::state_text, py::arg("rank") = kOfAll)
      .def("sections", &StoredCheckpoint::sections, py::arg("rank") = kOfAll)
      .def("value", &value, py::arg("keys"), py::arg("path"), py::arg("rank") = kOfAll)
      .def("read", &StoredCheckpoint::read, py::arg("destinations"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("optimizer_keys",
                             [](const StoredCheckpoint& stored) {
                               std::vector<std::string> keys;
                               for (const auto& [key, parts] : stored.parts()) keys.push_back(key);
                               return keys;
                             })
      .def("shape", &StoredCheckpoint::shape, py::arg("name"))
      .def("verify_rest", &StoredCheckpoint::verify_rest, py::arg("rank") = 0, py::arg("size") = 1,
           py::call_guard<py::gil_scoped_release>());
  bind_reads(module);
  py::class_<KeptFallBack>(module, "FallBack")
      .def(py::init<const std::string&>(), py::arg("folder"))
      .def("next", &next, py::call_guard<py::gil_scoped_release>())
      .def(
          "damaged", [](KeptFallBack& kept, const std::string& problem) { kept.fall_back.damaged(problem); },
          py::arg("problem"));
  module.def("checkpoints_in", &checkpoints_in, py::arg("folder"), py::call_guard<py::gil_scoped_release>());
  module.def("latest", &latest, py::arg("folder"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace roundpipe::python
