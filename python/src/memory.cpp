#include <roundpipe/memory/host_arena.h>
#include <roundpipe/memory/mapped_file.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;

void bind_memory(py::module_& module) {
  module.def("map_file", &memory::map_file, py::arg("path"), py::call_guard<py::gil_scoped_release>());
  module.def("is_mapped", &memory::is_mapped, py::arg("tensor"));
  module.def("host_arena", [] {
    const memory::HostArenaStats stats = memory::host_arena_stats();
    return py::make_tuple(stats.asked_bytes, stats.reserved_bytes, stats.locked_bytes, stats.pieces);
  });
}

}  // namespace roundpipe::python
