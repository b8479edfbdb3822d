#include <roundpipe/memory/crossing.h>
#include <roundpipe/memory/host_arena.h>
#include <roundpipe/memory/mapped_file.h>
#include <roundpipe/torch_compat/autograd_nodes.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;

void bind_memory(py::module_& module) {
  module.def("map_file", &memory::map_file, py::arg("path"), py::call_guard<py::gil_scoped_release>());
  module.def("settled_bytes", &memory::settled_bytes, py::arg("tensor"));
  module.def(
      "crossed_copy",
      [](const at::Tensor& tensor, const std::string& device) {
        const at::NoGradGuard no_grad;
        return memory::copy_alike(memory::settled(tensor.detach()), c10::Device(device));
      },
      py::arg("tensor"), py::arg("device"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "cross_boundary", [](const std::vector<at::Tensor>& outputs) { return torch_compat::cross_boundary(outputs); },
      py::arg("outputs"), py::call_guard<py::gil_scoped_release>());
  module.def("is_mapped", &memory::is_mapped, py::arg("tensor"));
  ValueClass<memory::HostArenaStats>(module, "HostArenaStats")
      .attribute("asked_bytes", &memory::HostArenaStats::asked_bytes)
      .attribute("reserved_bytes", &memory::HostArenaStats::reserved_bytes)
      .attribute("locked_bytes", &memory::HostArenaStats::locked_bytes)
      .attribute("pieces", &memory::HostArenaStats::pieces);
  module.def("host_arena", &memory::host_arena_stats);
}

}  // namespace roundpipe::python
