#include <optional>

#include <roundpipe/core/bytes.h>
#include <roundpipe/core/engine_life.h>
#include <roundpipe/device/device_spec.h>
#include <roundpipe/device/event.h>
#include <roundpipe/device/virtual/memory_meter.h>
#include <roundpipe/runtime/engine.h>
#include <roundpipe/runtime/step_memory.h>

#include "bindings.h"
#include "interpreter_lock.h"

namespace roundpipe::python {

namespace py = pybind11;
using runtime::Engine;

namespace {

// The bytes that a device's link has moved in each direction.
struct MovedBytes {
  int64_t uploaded;
  int64_t downloaded;
};

// What one class of transfers has used of one direction of a link.
struct LinkClass {
  const char* direction;
  transfer::Priority kind;
  transfer::LinkUse use;
};

std::vector<LinkClass> link_use(Engine& engine, int index) {
  std::vector<LinkClass> classes;
  for (const auto& [link, direction] : {std::pair{&engine.pool_worker(index).upload(), "up"},
                                        std::pair{&engine.pool_worker(index).download(), "down"}}) {
    for (size_t i = 0; i < transfer::kPriorities; ++i) {
      const auto kind = static_cast<transfer::Priority>(i);
      classes.push_back({direction, kind, link->use(kind)});
    }
  }
  return classes;
}

// Releases the interpreter lock while the last owner of an engine waits for its threads, which may need the lock.
std::shared_ptr<Engine> dropped_without_lock(std::shared_ptr<Engine> engine) {
  Engine* pointer = engine.get();
  return {pointer, [engine = std::move(engine)](Engine*) mutable {
            if (PyGILState_Check() != 0) {
              const py::gil_scoped_release no_gil;
              engine.reset();
            } else {
              engine.reset();
            }
          }};
}

}  // namespace

void bind_device(py::module_& module) {
  ValueClass<device::MemoryStats>(module, "MemoryStats")
      .attribute("current_bytes", &device::MemoryStats::current_bytes)
      .attribute("peak_bytes", &device::MemoryStats::peak_bytes)
      .attribute("limit_bytes", &device::MemoryStats::limit_bytes);
  ValueClass<MovedBytes>(module, "MovedBytes")
      .attribute("uploaded_bytes", &MovedBytes::uploaded)
      .attribute("downloaded_bytes", &MovedBytes::downloaded);
  ValueClass<LinkClass>(module, "LinkUse")
      .attribute("direction", &LinkClass::direction)
      .attribute("kind", [](const LinkClass& row) { return transfer::name_of(row.kind); })
      .attribute("transfers", [](const LinkClass& row) { return row.use.transfers; })
      .attribute("bytes", [](const LinkClass& row) { return row.use.bytes; })
      .attribute("queued_ms", [](const LinkClass& row) { return row.use.queued_ms; })
      .attribute("moving_ms", [](const LinkClass& row) { return row.use.moving_ms; });
  py::class_<Engine, std::shared_ptr<Engine>>(module, "Engine")
      .def_static(
          "current", [] { return dropped_without_lock(Engine::current()); }, py::call_guard<py::gil_scoped_release>())
      .def_static(
          "set_current",
          [](const std::optional<std::string>& text, std::optional<bool> fp16_accumulation) {
            const auto specs = text ? device::parse_devices(*text) : Engine::current()->specs();
            return dropped_without_lock(Engine::set_current(specs, fp16_accumulation));
          },
          py::arg("devices"), py::arg("fp16_accumulation") = py::none(), py::call_guard<py::gil_scoped_release>())
      .def_static("shut_down", &Engine::shut_down, py::call_guard<py::gil_scoped_release>())
      .def("__len__",
           [](Engine& engine) {
             require_engine();
             return engine.pool_size();
           })
      .def("device_names",
           [](Engine& engine) {
             std::vector<std::string> names;
             for (int i = 0; i < engine.pool_size(); ++i) names.push_back(engine.pool_worker(i).device().name());
             return names;
           })
      .def("torch_devices",
           [](Engine& engine) {
             std::vector<std::string> names;
             for (int i = 0; i < engine.pool_size(); ++i)
               names.push_back(engine.pool_worker(i).device().torch_device().str());
             return names;
           })
      .def_property_readonly("fp16_accumulation", &Engine::fp16_accumulation)
      .def("memory_caps",
           [](const Engine& engine) {
             std::vector<int64_t> caps;
             for (const device::DeviceSpec& spec : engine.specs()) caps.push_back(spec.memory_bytes);
             return caps;
           })
      .def(
          "memory", [](Engine& engine, int index) { return engine.pool_worker(index).device().memory(); },
          py::arg("index"))
      .def(
          "resident_bytes", [](Engine& engine, int index) { return engine.pool_worker(index).resident_bytes(); },
          py::arg("index"))
      .def("reset_peak_memory",
           [](Engine& engine) {
             for (int i = 0; i < engine.pool_size(); ++i) engine.pool_worker(i).device().reset_peak_memory();
           })
      .def("device_rules", &runtime::device_rules, py::arg("cap_bytes"))
      .def(
          "moved_bytes",
          [](Engine& engine, int index) {
            return MovedBytes{engine.pool_worker(index).upload().moved_bytes(),
                              engine.pool_worker(index).download().moved_bytes()};
          },
          py::arg("index"))
      .def("link_use", &link_use, py::arg("index"))
      .def("failed",
           [](const Engine& engine) {
             std::vector<std::pair<std::string, std::string>> failed;
             for (const Engine::Failed& gone : engine.failed()) failed.emplace_back(gone.name, gone.error);
             return failed;
           })
      .def("restore", &Engine::restore, py::call_guard<py::gil_scoped_release>())
      .def(
          "inject",
          [](Engine& engine, int index, const std::string& fault) {
            engine.pool_worker(index).device().inject(device::parse_fault(fault));
          },
          py::arg("index"), py::arg("fault"))
      .def("release_hangs", &Engine::release_hangs)
      .def(
          "hangs", [](Engine& engine, int index) { return engine.pool_worker(index).device().hangs(); },
          py::arg("index"));
  module.def("require_engine", &require_engine);
  module.def("require_callers_thread", &require_callers_thread);
  module.def("interpreter_lock_acquisitions", &InterpreterLock::acquisitions);
  py::class_<device::MemoryMeter>(module, "MemoryMeter")
      .def(py::init<>())
      .def(
          "__enter__",
          [](device::MemoryMeter& meter) -> device::MemoryMeter& {
            meter.enter();
            return meter;
          },
          py::return_value_policy::reference)
      .def("__exit__", [](device::MemoryMeter& meter, const py::args& /*error*/) { meter.exit(); })
      .def_property_readonly("current_bytes", &device::MemoryMeter::current_bytes)
      .def_property_readonly("peak_bytes", &device::MemoryMeter::peak_bytes)
      .def("reset_peak", &device::MemoryMeter::reset_peak);
  py::class_<device::Event, device::EventPtr>(module, "Event")
      .def(py::init(&device::make_event))
      .def("fire", &device::Event::fire)
      .def("wait", &device::wait_interruptible, py::call_guard<py::gil_scoped_release>());
  module.def(
      "device_names",
      [](const std::string& text) {
        std::vector<std::string> names;
        for (const device::DeviceSpec& spec : device::parse_devices(text)) names.push_back(spec.name());
        return names;
      },
      py::arg("devices"));
  module.def("parse_bytes", [](const std::string& text) { return parse_bytes(text, "bytes"); }, py::arg("text"));
  module.def("format_bytes", &format_bytes, py::arg("size_bytes"));
}

}  // namespace roundpipe::python
