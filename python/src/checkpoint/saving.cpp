#include <optional>

#include <roundpipe/saving/snapshot.h>
#include <roundpipe/saving/tensor_files.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using runtime::ModelOptimizer;
using saving::Snapshot;
using saving::SnapshotMemory;

void bind_saving(py::module_& module) {
  py::class_<SnapshotMemory, std::shared_ptr<SnapshotMemory>>(module, "SnapshotMemory")
      .def(py::init<int64_t>(), py::arg("limit_bytes"))
      .def("try_take", &SnapshotMemory::try_take, py::arg("bytes"))
      .def("note_wait", &SnapshotMemory::note_wait, py::arg("ms"))
      .def_property_readonly("most_bytes", [](const SnapshotMemory& memory) { return memory.report().most_bytes; })
      .def_property_readonly("longest_wait_ms",
                             [](const SnapshotMemory& memory) { return memory.report().longest_wait_ms; })
      .def_property_readonly("total_wait_ms",
                             [](const SnapshotMemory& memory) { return memory.report().total_wait_ms; });

  py::enum_<Snapshot::Part>(module, "SnapshotPart")
      .value("WEIGHTS", Snapshot::Part::kWeights)
      .value("PREVIOUS", Snapshot::Part::kPrevious)
      .value("REMAINDER", Snapshot::Part::kRemainder)
      .value("MOMENT", Snapshot::Part::kMoment)
      .value("GRADIENT", Snapshot::Part::kGradient);
  ValueClass<Snapshot::Piece>(module, "SnapshotPiece")
      .attribute("part", &Snapshot::Piece::part)
      .attribute("block", &Snapshot::Piece::block)
      .attribute("parameter", &Snapshot::Piece::parameter)
      .attribute("moment", &Snapshot::Piece::moment)
      .attribute("tensor", &Snapshot::Piece::tensor);
  ValueClass<Snapshot::Counters>(module, "SnapshotCounters")
      .attribute("block", &Snapshot::Counters::block)
      .attribute("parameter", &Snapshot::Counters::parameter)
      .attribute("scalars", &Snapshot::Counters::scalars);
  py::class_<Snapshot, std::shared_ptr<Snapshot>>(module, "Snapshot")
      .def_static(
          "of",
          [](const std::shared_ptr<ModelOptimizer>& optimizer, std::shared_ptr<SnapshotMemory> memory,
             bool with_weights) { return Snapshot::of(*optimizer, std::move(memory), optimizer, with_weights); },
          py::arg("optimizer"), py::arg("memory"), py::arg("with_weights"))
      .def("wait_ready", &Snapshot::wait_ready, py::call_guard<py::gil_scoped_release>())
      .def("pieces", &Snapshot::pieces)
      .def("counters", &Snapshot::counters)
      .def(
          "write",
          [](Snapshot& snapshot, const std::vector<std::pair<checkpoint::OutputFile*, int64_t>>& targets, int threads) {
            snapshot.write(
                [&targets](size_t piece, const at::Tensor& tensor) {
                  saving::write_tensor({targets.at(piece).first, targets.at(piece).second}, tensor);
                },
                threads);
          },
          py::arg("targets"), py::arg("threads"), py::call_guard<py::gil_scoped_release>())
      .def("cancel", &Snapshot::cancel, py::call_guard<py::gil_scoped_release>());

  module.def(
      "write_tensor",
      [](checkpoint::OutputFile& file, int64_t offset, const at::Tensor& tensor) {
        saving::write_tensor({&file, offset}, tensor);
      },
      py::arg("file"), py::arg("offset"), py::arg("tensor"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace roundpipe::python
