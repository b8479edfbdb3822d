// The extension _fake_card: what fake_card.py needs beside torch's own interfaces.
#include <torch/csrc/utils/pybind.h>

#include "generator.h"
#include "kernels.h"
#include "launcher.h"
#include "memory.h"
#include "stream.h"

namespace fake_card {
namespace {

namespace py = pybind11;
using release_gil = py::call_guard<py::gil_scoped_release>;

c10::DeviceIndex card(int index) { return static_cast<c10::DeviceIndex>(index); }

PYBIND11_MODULE(_fake_card, module) {
  module.def("device_count", [] { return static_cast<int>(card_count()); });
  module.def("default_generator", [](int index) { return default_generator(card(index)); });
  module.def("limit_memory", [](int index, size_t bytes) { limit_memory(card(index), bytes); }, release_gil());
  module.def("has_context", [](int index) { return has_context(card(index)); });
  module.def("host_reads", &host_reads);
  module.def("set_delays", &set_delays);
  module.def("set_fault", [](int index, const std::string& why) { set_fault(card(index), why); });
  module.def("clear_fault", [](int index) { clear_fault(card(index)); });
  module.def("set_kernels_missing", &set_kernels_missing);
  module.def("launched", &launched);
  module.def("hold", [](int index, int64_t stream) { stream_of(card(index), stream).hold(); });
  module.def("release", [](int index, int64_t stream) { stream_of(card(index), stream).release(); });
  module.def("slow_down", [](int index, int64_t stream, double ms) { stream_of(card(index), stream).slow_down(ms); });
  module.def(
      "occupy",
      [](double ms) {
        launch(current_card(), "occupy",
               [ms] { std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(ms)); });
      },
      release_gil());
}

}  // namespace
}  // namespace fake_card
