#include <unordered_map>

#include <roundpipe/cluster/nodes.h>
#include <roundpipe/training/fused_steps.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using runtime::ModelOptimizer;
using runtime::StepRun;

namespace {

// The group of a parameter by the parameters of each group; negative: none has it.
FusedSteps::GroupOf group_of(const std::vector<std::vector<at::Tensor>>& groups) {
  std::unordered_map<const c10::TensorImpl*, int> found;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (const at::Tensor& parameter : groups[i]) found[parameter.unsafeGetTensorImpl()] = static_cast<int>(i);
  }
  return [found = std::move(found)](const at::Tensor& parameter) {
    const auto own = found.find(parameter.unsafeGetTensorImpl());
    return own == found.end() ? -1 : own->second;
  };
}

}  // namespace

void bind_model_optimizer(py::module_& module) {
  py::enum_<ClipBy>(module, "ClipBy")
      .value("NORM", ClipBy::kNorm)
      .value("LAST_NORM", ClipBy::kLastNorm)
      .value("MEASURED_NORM", ClipBy::kMeasuredNorm);
  py::class_<StepOptions>(module, "StepOptions")
      .def(py::init([](bool asynchronous, std::optional<double> max_grad_norm, ClipBy clip_by) {
             StepOptions options{.asynchronous = asynchronous, .max_grad_norm = max_grad_norm, .clip_by = clip_by};
             check(options, /*several_nodes=*/true);
             return options;
           }),
           py::arg("asynchronous"), py::arg("max_grad_norm"), py::arg("clip_by") = ClipBy::kNorm)
      .def_readonly("asynchronous", &StepOptions::asynchronous)
      .def_readonly("max_grad_norm", &StepOptions::max_grad_norm)
      .def_readwrite("gradient_factor", &StepOptions::gradient_factor);
  py::class_<StepRun, std::shared_ptr<StepRun>>(module, "StepRun")
      .def(
          "wait_measured", [](const StepRun& run) { device::wait_interruptible(*run.measured()); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "wait_decided", [](const StepRun& run) { device::wait_interruptible(*run.decided()); },
          py::call_guard<py::gil_scoped_release>())
      .def(
          "wait_finished", [](const StepRun& run) { device::wait_interruptible(*run.finished()); },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("finished", [](const StepRun& run) { return run.finished()->complete(); })
      .def_property_readonly("norm", &StepRun::norm)
      .def_property_readonly("overflowed", &StepRun::overflowed)
      .def_property_readonly("updated_blocks", &StepRun::updated_blocks)
      .def_property_readonly("abandoned_blocks", &StepRun::abandoned_blocks);

  py::class_<FusedRule>(module, "FusedRule")
      .def(py::init([](optim::Algorithm algorithm, std::vector<optim::Hyperparameters> groups,
                       const optim::StateFormat& format, bool gradients_in_fp32, DiskOptions disk,
                       bool gradients_at_once) {
             return FusedRule{algorithm,         std::move(groups), format,
                              gradients_in_fp32, std::move(disk),   gradients_at_once};
           }),
           py::arg("algorithm"), py::arg("groups"), py::arg("format"), py::arg("gradients_in_fp32"), py::arg("disk"),
           py::arg("gradients_at_once"));
  ValueClass<ModelOptimizer::HostBytes>(module, "HostBytes")
      .attribute("parameters", &ModelOptimizer::HostBytes::parameters)
      .attribute("weights_and_gradients", &ModelOptimizer::HostBytes::weights_and_gradients)
      .attribute("masters", &ModelOptimizer::HostBytes::remainders)
      .attribute("moments", &ModelOptimizer::HostBytes::moments)
      .attribute("moments_on_disk", &ModelOptimizer::HostBytes::moments_on_disk)
      .attribute("masters_on_disk", &ModelOptimizer::HostBytes::remainders_on_disk);
  py::class_<ModelOptimizer, std::shared_ptr<ModelOptimizer>>(module, "ModelOptimizer")
      .def("accept_weights", &ModelOptimizer::accept_weights)
      .def_property("last_norm", &ModelOptimizer::last_norm, &ModelOptimizer::set_last_norm)
      .def("disk_stats",
           [](const ModelOptimizer& optimizer) {
             const std::shared_ptr<storage::DiskTier>& disk = optimizer.disk_tier();
             return disk == nullptr ? std::nullopt : std::optional(disk->stats());
           })
      .def(
          "place",
          [](const ModelOptimizer& optimizer, const at::Tensor& parameter) {
            const ModelOptimizer::Place place = optimizer.place(parameter);
            return std::pair(place.block, place.parameter);
          },
          py::arg("parameter"))
      .def(
          "trains",
          [](ModelOptimizer& optimizer, const at::Tensor& parameter) {
            const ModelOptimizer::Place place = optimizer.place(parameter);
            return optimizer.block(place.block).group(place.parameter) >= 0;
          },
          py::arg("parameter"))
      .def(
          "trains_beside",
          [](ModelOptimizer& optimizer, const at::Tensor& parameter) {
            return optimizer.block(optimizer.place(parameter).block).trains_any();
          },
          py::arg("parameter"))
      .def(
          "state",
          [](ModelOptimizer& optimizer, const at::Tensor& parameter) {
            const ModelOptimizer::Place place = optimizer.place(parameter);
            optim::BlockOptimizer& block = optimizer.block(place.block);
            optim::ParameterState state;
            {
              optim::BlockStates::Hold hold = block.states().hold();
              state = hold[place.parameter];
              if (block.states().tier()) {
                for (at::Tensor& tensor : state.tensors) tensor = tensor.clone();
              }
            }
            const at::Tensor remainder = block.remainder_copy(place.parameter);
            return std::pair(std::move(state), remainder.defined() ? std::optional(remainder) : std::nullopt);
          },
          py::arg("parameter"), py::call_guard<py::gil_scoped_release>())
      .def(
          "remainder_dtype",
          [](ModelOptimizer& optimizer, const at::Tensor& parameter) {
            const ModelOptimizer::Place place = optimizer.place(parameter);
            const at::Tensor& remainder = optimizer.block(place.block).remainder(place.parameter);
            return remainder.defined() ? std::optional(remainder.scalar_type()) : std::nullopt;
          },
          py::arg("parameter"))
      .def(
          "set_remainder",
          [](ModelOptimizer& optimizer, const at::Tensor& parameter, const at::Tensor& saved) {
            const ModelOptimizer::Place place = optimizer.place(parameter);
            optimizer.block(place.block).set_remainder(place.parameter, saved);
          },
          py::arg("parameter"), py::arg("saved"), py::call_guard<py::gil_scoped_release>())
      .def(
          "set_state",
          [](ModelOptimizer& optimizer, const at::Tensor& parameter, const optim::Scalars& scalars,
             std::vector<at::Tensor> tensors) {
            const ModelOptimizer::Place place = optimizer.place(parameter);
            optimizer.block(place.block).states().set(place.parameter, {scalars, std::move(tensors)});
          },
          py::arg("parameter"), py::arg("scalars"), py::arg("tensors"), py::call_guard<py::gil_scoped_release>())
      .def(
          "shard",
          [](ModelOptimizer& optimizer, const at::Tensor& parameter) {
            const ModelOptimizer::Place place = optimizer.place(parameter);
            const optim::ElementRange& shard = optimizer.block(place.block).shard(place.parameter);
            return std::pair(shard.first, shard.last);
          },
          py::arg("parameter"))
      .def(
          "restart_master",
          [](ModelOptimizer& optimizer, const at::Tensor& parameter) {
            const ModelOptimizer::Place place = optimizer.place(parameter);
            optimizer.restart_masters(place.block, {place.parameter});
          },
          py::arg("parameter"), py::call_guard<py::gil_scoped_release>())
      .def(
          "host_bytes",
          [](const ModelOptimizer& optimizer, const std::vector<optim::Hyperparameters>& groups) {
            return optimizer.host_bytes(groups);
          },
          py::arg("groups"));

  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  py::class_<FusedSteps, std::shared_ptr<FusedSteps>>(module, "FusedSteps")
      .def(py::init([](FusedSteps::Models models, const TrainedParameters::Named& host_parameters) {
             FusedSteps::HostParameters parameters;
             for (const auto& [name, tensor] : host_parameters) parameters.push_back({name, tensor});
             return std::make_shared<FusedSteps>(std::move(models), std::move(parameters));
           }),
           py::arg("models"), py::arg("host_parameters"))
      .def(
          "require_room",
          [](const FusedSteps& steps, const std::string& name, const FusedRule& rule,
             const std::vector<std::vector<at::Tensor>>& groups,
             int nodes) { steps.require_room("optim", name, rule, group_of(groups), nodes); },
          py::arg("name"), py::arg("rule"), py::arg("groups"), py::arg("nodes"), unlocked)
      .def("prepare_bind", &FusedSteps::prepare_bind, unlocked)
      .def(
          "bind",
          [](FusedSteps& steps, const FusedRule& rule, TrainedParameters::Named named,
             const std::vector<std::vector<at::Tensor>>& groups, std::shared_ptr<cluster::Nodes> nodes) {
            steps.bind(rule, std::move(named), group_of(groups), std::move(nodes));
            return steps.optimizer();
          },
          py::arg("rule"), py::arg("named"), py::arg("groups"), py::arg("nodes") = nullptr, unlocked)
      .def_property_readonly("pipelines", &FusedSteps::pipelines)
      .def_property_readonly("host_pipeline", &FusedSteps::host_pipeline)
      .def("late_parameter", &FusedSteps::late_parameter)
      .def("prepare_step", &FusedSteps::prepare_step, py::arg("asynchronous"), unlocked)
      .def("start_step", &FusedSteps::start_step, py::arg("groups"), py::arg("options"), py::arg("loss_scale"),
           unlocked)
      .def("measure_gradients", &FusedSteps::measure_gradients, unlocked)
      .def("synchronize", &FusedSteps::synchronize, unlocked)
      .def("show_weights", &FusedSteps::show_weights, unlocked)
      .def_property_readonly("hides_weights", &FusedSteps::hides_weights)
      .def("show_host_weights", &FusedSteps::show_host_weights, unlocked)
      .def("drop_gradients", &FusedSteps::drop_gradients, unlocked);
}

}  // namespace roundpipe::python
