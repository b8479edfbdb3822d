#include <roundpipe/memory/host_arena.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;

void bind_memory(py::module_& module) {
  module.def("host_arena", [] {
    const memory::HostArenaStats stats = memory::host_arena_stats();
    return py::make_tuple(stats.asked_bytes, stats.reserved_bytes, stats.locked_bytes, stats.pieces);
  });
}

}  // namespace roundpipe::python
