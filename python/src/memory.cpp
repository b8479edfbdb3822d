#include <pybind11/functional.h>

#include <roundpipe/memory/crossing.h>
#include <roundpipe/memory/host_arena.h>
#include <roundpipe/memory/host_room.h>
#include <roundpipe/memory/mapped_file.h>
#include <roundpipe/optim/block_optimizer.h>
#include <roundpipe/simulate/memory_simulator.h>
#include <roundpipe/simulate/update_with_disk.h>
#include <roundpipe/storage/disk_meter.h>
#include <roundpipe/storage/disk_tier.h>
#include <roundpipe/training/host_memory.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;

namespace {

using simulate::LayerBytes;
using simulate::LayerFootprint;
using simulate::ParameterSize;
using simulate::StepSizes;

// Of what lies on devices.
ParameterSize size_of(const at::Tensor& tensor, bool trains, bool tied) {
  return {tensor.numel(),
          tensor.element_size(),
          /*master_bytes=*/0,
          /*moment_bytes=*/0,
          trains && tensor.requires_grad(),
          tied};
}

void bind_memory_simulator(py::module_& module) {
  module.attr("STAGED_MICROBATCHES") = kStagedMicrobatches;
  py::enum_<RecomputeGrain>(module, "RecomputeGrain")
      .value("STAGE", RecomputeGrain::kStage)
      .value("LAYER", RecomputeGrain::kLayer);
  ValueClass<LayerBytes>(module, "LayerBytes")
      .attribute("weights", &LayerBytes::weights)
      .attribute("gradients", &LayerBytes::gradients)
      .attribute("sums", &LayerBytes::sums)
      .attribute("rounded", &LayerBytes::rounded)
      .def_property_readonly("frozen_bytes",
                             [](const LayerBytes& layer) {
                               int64_t bytes = 0;
                               for (const FrozenBlock& block : layer.frozen) bytes += block.bytes;
                               return bytes;
                             })
      .def(py::init([](int64_t weights, int64_t gradients, int64_t sums, int64_t rounded) {
             return LayerBytes{weights, gradients, sums, rounded, /*joined=*/{}, /*frozen=*/{}};
           }),
           py::arg("weights"), py::arg("gradients"), py::arg("sums"), py::arg("rounded"));
  ValueClass<LayerFootprint>(module, "LayerFootprint")
      .attribute("inputs", &LayerFootprint::inputs)
      .attribute("outputs", &LayerFootprint::outputs)
      .attribute("output_gradients", &LayerFootprint::output_gradients)
      .attribute("forward", &LayerFootprint::forward)
      .attribute("saved", &LayerFootprint::saved)
      .attribute("backward", &LayerFootprint::backward)
      .def(py::init([](int64_t inputs, int64_t outputs, int64_t output_gradients, int64_t forward, int64_t saved,
                       int64_t backward) {
             return LayerFootprint{inputs, outputs, output_gradients, forward, saved, backward};
           }),
           py::arg("inputs"), py::arg("outputs"), py::arg("output_gradients"), py::arg("forward"), py::arg("saved"),
           py::arg("backward"))
      .def("scaled", &simulate::scaled, py::arg("rows"), py::arg("measured_rows"))
      .def("kept_bytes", &simulate::kept_bytes, py::arg("grain"));
  py::class_<StepSizes>(module, "StepSizes")
      .def(py::init([](std::vector<LayerBytes> layers, std::vector<LayerFootprint> footprints, RecomputeGrain grain,
                       int64_t label_bytes, int gradient_groups) {
             return StepSizes{std::move(layers), std::move(footprints), grain, label_bytes, gradient_groups};
           }),
           py::arg("layers"), py::arg("footprints"), py::arg("grain"), py::arg("label_bytes"),
           py::arg("gradient_groups"));
  ValueClass<simulate::DeviceMemory>(module, "DeviceMemory")
      .attribute("weights", &simulate::DeviceMemory::weights)
      .attribute("gradients", &simulate::DeviceMemory::gradients)
      .attribute("values", &simulate::DeviceMemory::values)
      .attribute("work", &simulate::DeviceMemory::work)
      .attribute("resident", &simulate::DeviceMemory::resident);
  ValueClass<simulate::DeviceRules>(module, "DeviceRules")
      .attribute("cap_bytes", &simulate::DeviceRules::cap_bytes)
      .attribute("waits", &simulate::DeviceRules::waits)
      .attribute("most_resident_bytes", &simulate::DeviceRules::most_resident_bytes)
      .def(py::init([](int64_t cap_bytes) { return simulate::DeviceRules{.cap_bytes = cap_bytes}; }),
           py::arg("cap_bytes"));
  module.def(
      "layer_bytes",
      [](const std::vector<at::Tensor>& tensors, const std::vector<bool>& tied) {
        std::vector<ParameterSize> sizes;
        for (size_t i = 0; i < tensors.size(); ++i) sizes.push_back(size_of(tensors[i], /*trains=*/true, tied.at(i)));
        return simulate::layer_bytes(sizes);
      },
      py::arg("tensors"), py::arg("tied"));
  module.def(
      "predict_devices",
      [](const std::vector<schedule::Plan>& plans, const StepSizes& sizes, const std::vector<std::int64_t>& cap_bytes) {
        for (const schedule::Plan& plan : plans) {
          if (cap_bytes.size() != static_cast<std::size_t>(plan.devices))
            throw std::invalid_argument("[predict_devices] cap_bytes has " + std::to_string(cap_bytes.size()) +
                                        " entries, expected one for each device, " + std::to_string(plan.devices));
        }
        return simulate::predict_devices(plans, sizes, cap_bytes);
      },
      py::arg("plans"), py::arg("sizes"), py::arg("cap_bytes"));
  module.def(
      "predict_device",
      [](const std::vector<schedule::Plan>& plans, const StepSizes& sizes, const simulate::DeviceRules& rules) {
        return simulate::predict_device(plans, sizes, rules);
      },
      py::arg("plans"), py::arg("sizes"), py::arg("rules"));
  module.def(
      "waiting_on_host",
      [](const schedule::Plan& plan, const std::vector<LayerFootprint>& footprints, int microbatches) {
        return simulate::waiting_on_host(plan, footprints, microbatches);
      },
      py::arg("plan"), py::arg("footprints"), py::arg("microbatches"));
  module.def("partial_sum_bytes", &simulate::partial_sum_bytes, py::arg("plan"), py::arg("sizes"));
  py::class_<OptimizerMemory>(module, "OptimizerMemory")
      .def(py::init([](optim::Algorithm algorithm, const optim::Hyperparameters& options,
                       const optim::StateFormat& format, const DiskOptions& disk, bool gradients_at_once) {
             return OptimizerMemory{.algorithm = algorithm,
                                    .options = options,
                                    .format = format,
                                    .disk = disk,
                                    .gradients_at_once = gradients_at_once};
           }),
           py::arg("algorithm"), py::arg("options"), py::arg("format"), py::arg("disk"), py::arg("gradients_at_once"))
      .def("of_command", &of_command, py::arg("parameters"), py::arg("classes"))
      .def_readonly("algorithm", &OptimizerMemory::algorithm)
      .def_readonly("options", &OptimizerMemory::options)
      .def_readonly("format", &OptimizerMemory::format);
  ValueClass<HostPrediction>(module, "HostPrediction")
      .attribute("weights", [](const HostPrediction& host) { return host.weights; })
      .attribute("gradients", [](const HostPrediction& host) { return host.gradients; })
      .attribute("masters", [](const HostPrediction& host) { return host.masters; })
      .attribute("moments", [](const HostPrediction& host) { return host.moments; })
      .attribute("moments_on_disk", [](const HostPrediction& host) { return host.moments_on_disk; })
      .attribute("masters_on_disk", [](const HostPrediction& host) { return host.masters_on_disk; })
      .attribute("values", &HostPrediction::values)
      .attribute("partial_sums", &HostPrediction::partial_sums)
      .attribute("kept_for_failures", &HostPrediction::kept_for_failures)
      .def_property_readonly("total", &HostPrediction::total)
      .def("rows",
           [](const HostPrediction& host) {
             py::dict rows;
             for (const auto& [name, bytes] : rows_of(host)) rows[py::str(name)] = bytes;
             return rows;
           })
      .def(py::init([](int64_t weights, int64_t gradients, int64_t masters, int64_t moments, int64_t values,
                       int64_t partial_sums, int64_t kept_for_failures, int64_t moments_on_disk,
                       int64_t masters_on_disk) {
             return HostPrediction{{weights, gradients, masters, moments, moments_on_disk, masters_on_disk},
                                   values,
                                   partial_sums,
                                   kept_for_failures};
           }),
           py::arg("weights"), py::arg("gradients"), py::arg("masters"), py::arg("moments"), py::arg("values") = 0,
           py::arg("partial_sums") = 0, py::arg("kept_for_failures") = 0, py::arg("moments_on_disk") = 0,
           py::arg("masters_on_disk") = 0);
  module.def(
      "predict_host",
      [](const std::vector<std::vector<at::Tensor>>& blocks, const OptimizerMemory& optimizer, bool trains,
         int64_t partial_sums) {
        return HostPrediction{host_memory_of(blocks, optimizer, trains), 0, partial_sums, 0};
      },
      py::arg("blocks"), py::arg("optimizer"), py::arg("trains"), py::arg("partial_sums"));
  py::enum_<Steps>(module, "Steps")
      .value("UNKNOWN", Steps::kUnknown)
      .value("SYNCHRONOUS", Steps::kSynchronous)
      .value("ASYNCHRONOUS", Steps::kAsynchronous);
  module.def(
      "narrower_formats",
      [](const OptimizerMemory& optimizer, Steps steps, std::optional<c10::ScalarType> weights) {
        std::vector<std::vector<std::pair<std::string, std::string>>> changes;
        for (const NarrowerOptimizer& way : narrower_formats(optimizer, steps, weights))
          changes.emplace_back(way.changes.begin(), way.changes.end());
        return changes;
      },
      py::arg("optimizer"), py::arg("steps"), py::arg("weights") = py::none());
  module.def(
      "require_host",
      [](const std::string& where, const std::string& name, int64_t budget_bytes,
         const std::function<HostPrediction(const OptimizerMemory&)>& predict,
         const std::optional<OptimizerMemory>& optimizer) {
        require_host(where.c_str(), name, budget_bytes, predict, optimizer);
      },
      py::arg("where"), py::arg("name"), py::arg("budget_bytes"), py::arg("predict"), py::arg("optimizer"));
  module.def(
      "tied_sum_bytes",
      [](const at::Tensor& parameter, int layers) {
        return simulate::tied_sum_bytes(size_of(parameter, /*trains=*/true, /*tied=*/true), layers);
      },
      py::arg("parameter"), py::arg("layers"));
}

void bind_disk(py::module_& module) {
  py::class_<DiskOptions>(module, "DiskOptions")
      .def(py::init([](std::string folder, int64_t memory_bytes, const std::string& holds) {
             DiskOptions disk{std::move(folder), memory_bytes, parse_disk_holds(holds)};
             check(disk);
             return disk;
           }),
           py::arg("folder") = "", py::arg("memory_bytes") = 0, py::arg("holds") = "moments");
  ValueClass<storage::DiskTier::Stats>(module, "DiskStats")
      .attribute("read_bytes", &storage::DiskTier::Stats::read_bytes)
      .attribute("written_bytes", &storage::DiskTier::Stats::written_bytes)
      .attribute("most_memory_bytes", &storage::DiskTier::Stats::most_memory_bytes)
      .attribute("waited_ms", &storage::DiskTier::Stats::waited_ms);
  ValueClass<storage::DiskSpeed>(module, "DiskSpeed")
      .attribute("write_gb_per_s", &storage::DiskSpeed::write_gb_per_s)
      .attribute("read_gb_per_s", &storage::DiskSpeed::read_gb_per_s)
      .attribute("both_gb_per_s", &storage::DiskSpeed::both_gb_per_s);
  module.def(
      "measure_disk", [](const std::string& folder, int64_t bytes) { return storage::measure_disk(folder, bytes); },
      py::arg("folder"), py::arg("bytes"), py::call_guard<py::gil_scoped_release>());
  module.def("update_rate_with_disk", &simulate::update_rate_with_disk, py::arg("update_gb_per_s"),
             py::arg("disk_gb_per_s"), py::arg("weight_bytes"), py::arg("disk_bytes"));
  module.def("days_of_disk", &simulate::days_of_disk, py::arg("endurance_bytes"), py::arg("disk_bytes"),
             py::arg("step_ms"));
}

}  // namespace

void bind_memory(py::module_& module) {
  bind_disk(module);
  bind_memory_simulator(module);
  module.def("map_file", &memory::map_file, py::arg("path"), py::call_guard<py::gil_scoped_release>());
  module.def("free_host_bytes", &memory::free_host_bytes);
  module.def("resident_bytes", &memory::resident_bytes);
  module.def("is_mapped", &memory::is_mapped, py::arg("tensor"));
  ValueClass<memory::HostArenaStats>(module, "HostArenaStats")
      .attribute("asked_bytes", &memory::HostArenaStats::asked_bytes)
      .attribute("reserved_bytes", &memory::HostArenaStats::reserved_bytes)
      .attribute("locked_bytes", &memory::HostArenaStats::locked_bytes)
      .attribute("pieces", &memory::HostArenaStats::pieces);
  module.def("host_arena", &memory::host_arena_stats);
}

}  // namespace roundpipe::python
