#include <roundpipe/runs/stored_checkpoint.h>

#include <roundpipe/checkpoint/fall_back.h>
#include <roundpipe/runs/capture.h>
#include <roundpipe/runs/run_folders.h>

#include "bindings.h"
#include "state_values.h"

namespace roundpipe::python {

namespace py = pybind11;
using checkpoint::FallBack;

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

using Triples = std::vector<std::tuple<std::string, std::string, at::Tensor>>;

void read_files(const StoredCheckpoint& stored, const Triples& destinations) {
  StoredCheckpoint::FileDestinations by_file;
  for (const auto& [file, name, tensor] : destinations) by_file[file].emplace_back(name, tensor);
  stored.read_files(by_file);
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

uint64_t fingerprint(StoredCheckpoint& stored, const py::list& keys, int64_t rank) {
  const nlohmann::json& encoded = found(stored, keys, rank);
  const py::gil_scoped_release unlocked;
  return stored.fingerprint(encoded, rank);
}

using Ranges = std::map<std::string, std::vector<std::tuple<std::string, int64_t, at::Tensor>>>;

void read_ranges(const StoredCheckpoint& stored, const Ranges& ranges) {
  StoredCheckpoint::FileRanges by_file;
  for (const auto& [file, parts] : ranges) {
    for (const auto& [name, first, tensor] : parts) by_file[file].push_back({name, first, tensor});
  }
  stored.read_ranges(by_file);
}

}  // namespace

void bind_stored_checkpoint(py::module_& module) {
  constexpr int64_t kOfAll = StoredCheckpoint::kOfAll;
  ValueClass<StoredTensor>(module, "StoredTensor")
      .attribute("file", &StoredTensor::file)
      .attribute("torch_dtype", &StoredTensor::dtype)
      .attribute("shape", [](const StoredTensor& tensor) { return py::tuple(py::cast(tensor.shape)); })
      .attribute("bytes", &StoredTensor::bytes);
  py::class_<StoredCheckpoint>(module, "StoredCheckpoint")
      .def(py::init([](const std::string& folder, bool weights_only) {
             const py::gil_scoped_release unlocked;
             using Contents = StoredCheckpoint::Contents;
             return std::make_unique<StoredCheckpoint>(folder, weights_only ? Contents::kWeights : Contents::kAll);
           }),
           py::arg("folder"), py::arg("weights_only") = false)
      .def_property_readonly("manifest", &StoredCheckpoint::manifest)
      .def("state_text", &StoredCheckpoint::state_text, py::arg("rank") = kOfAll)
      .def("sections", &StoredCheckpoint::sections, py::arg("rank") = kOfAll)
      .def("value", &value, py::arg("keys"), py::arg("path"), py::arg("rank") = kOfAll)
      .def("fingerprint", &fingerprint, py::arg("keys"), py::arg("rank") = kOfAll)
      .def("read_files", &read_files, py::arg("destinations"), py::call_guard<py::gil_scoped_release>())
      .def("read_ranges", &read_ranges, py::arg("ranges"), py::call_guard<py::gil_scoped_release>())
      .def("require_whole", &StoredCheckpoint::require_whole, py::arg("sections"),
           py::call_guard<py::gil_scoped_release>())
      .def("verify_rest", &StoredCheckpoint::verify_rest, py::arg("rank") = 0, py::arg("size") = 1,
           py::call_guard<py::gil_scoped_release>());
  py::class_<KeptFallBack>(module, "FallBack")
      .def(py::init<const std::string&>(), py::arg("folder"))
      .def("next", &next, py::call_guard<py::gil_scoped_release>())
      .def(
          "damaged", [](KeptFallBack& kept, const std::string& problem) { kept.fall_back.damaged(problem); },
          py::arg("problem"));
  module.def("of_rank", &of_rank, py::arg("name"), py::arg("rank"));
  module.def("checkpoints_in", &checkpoints_in, py::arg("folder"), py::call_guard<py::gil_scoped_release>());
  module.def("sampled_checksum", &sampled_checksum, py::arg("tensor"), py::call_guard<py::gil_scoped_release>());
  module.def("latest", &latest, py::arg("folder"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace roundpipe::python
