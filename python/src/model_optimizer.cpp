#include <roundpipe/layers/host_parameters.h>
#include <roundpipe/runtime/model_optimizer.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using runtime::ModelOptimizer;
using runtime::StepRun;

void bind_model_optimizer(py::module_& module) {
  py::class_<StepOptions>(module, "StepOptions")
      .def(py::init([](bool asynchronous, std::optional<double> max_grad_norm) {
             StepOptions options{.asynchronous = asynchronous, .max_grad_norm = max_grad_norm};
             check(options, /*several_nodes=*/true);
             return options;
           }),
           py::arg("asynchronous"), py::arg("max_grad_norm"))
      .def_readonly("asynchronous", &StepOptions::asynchronous)
      .def_readonly("max_grad_norm", &StepOptions::max_grad_norm)
      .def_readwrite("gradient_factor", &StepOptions::gradient_factor);
  py::class_<StepRun, std::shared_ptr<StepRun>>(module, "StepRun")
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

  py::class_<cluster::Nodes, std::shared_ptr<cluster::Nodes>>(module, "Nodes")
      .def(py::init([](const std::string& gradients, const std::string& weights, double timeout_s) {
             return cluster::Nodes::of_names(gradients, weights,
                                             std::chrono::milliseconds(static_cast<int64_t>(timeout_s * 1000)));
           }),
           py::arg("gradients"), py::arg("weights"), py::arg("timeout_s"), py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("rank", &cluster::Nodes::rank)
      .def_property_readonly("size", &cluster::Nodes::size)
      .def_static("drain_all", &cluster::Channel::drain_all, py::call_guard<py::gil_scoped_release>());

  ValueClass<ModelOptimizer::HostBytes>(module, "HostBytes")
      .attribute("parameters", &ModelOptimizer::HostBytes::parameters)
      .attribute("weights_and_gradients", &ModelOptimizer::HostBytes::weights_and_gradients)
      .attribute("masters", &ModelOptimizer::HostBytes::remainders)
      .attribute("moments", &ModelOptimizer::HostBytes::moments);
  py::class_<ModelOptimizer, std::shared_ptr<ModelOptimizer>>(module, "ModelOptimizer")
      .def(py::init<std::vector<std::shared_ptr<runtime::Pipeline>>, const std::vector<std::vector<std::vector<int>>>&,
                    optim::Algorithm, optim::MomentFormat, std::shared_ptr<cluster::Nodes>>(),
           py::arg("pipelines"), py::arg("groups"), py::arg("algorithm"), py::arg("format"), py::arg("nodes") = nullptr)
      .def(
          "step",
          [](ModelOptimizer& optimizer, std::vector<optim::Hyperparameters> groups, const StepOptions& options,
             double loss_scale) { return optimizer.step(std::move(groups), options, loss_scale); },
          py::arg("groups"), py::arg("options"), py::arg("loss_scale"), py::call_guard<py::gil_scoped_release>())
      .def("make_room", &ModelOptimizer::make_room, py::call_guard<py::gil_scoped_release>())
      .def("finish", &ModelOptimizer::finish, py::call_guard<py::gil_scoped_release>())
      .def("accept_weights", &ModelOptimizer::accept_weights)
      .def(
          "state",
          [](ModelOptimizer& optimizer, size_t block, size_t parameter) -> optim::ParameterState& {
            return optimizer.block(block).state(parameter);
          },
          py::arg("block"), py::arg("parameter"), py::return_value_policy::reference_internal)
      .def(
          "remainder",
          [](ModelOptimizer& optimizer, size_t block, size_t parameter) -> std::optional<at::Tensor> {
            const at::Tensor& remainder = optimizer.block(block).remainder(parameter);
            return remainder.defined() ? std::optional(remainder) : std::nullopt;
          },
          py::arg("block"), py::arg("parameter"))
      .def(
          "shard",
          [](ModelOptimizer& optimizer, size_t block) {
            std::vector<std::pair<int64_t, int64_t>> ranges;
            const optim::BlockOptimizer& state = optimizer.block(block);
            for (size_t i = 0; i < state.parameters(); ++i)
              ranges.emplace_back(state.shard(i).first, state.shard(i).last);
            return ranges;
          },
          py::arg("block"))
      .def(
          "restart_master",
          [](ModelOptimizer& optimizer, size_t block, size_t parameter, const at::Tensor& weights) {
            optimizer.block(block).restart_master(parameter, weights.detach());
          },
          py::arg("block"), py::arg("parameter"), py::arg("weights"), py::call_guard<py::gil_scoped_release>())
      .def(
          "host_bytes",
          [](const ModelOptimizer& optimizer, const std::vector<optim::Hyperparameters>& groups) {
            return optimizer.host_bytes(groups);
          },
          py::arg("groups"));

  module.def(
      "host_parameters",
      [](const std::string& name, const std::vector<std::string>& names, const std::vector<at::Tensor>& tensors) {
        std::vector<memory::NamedTensor> parameters;
        for (size_t i = 0; i < names.size(); ++i) parameters.push_back({names[i], tensors[i]});
        std::vector<std::unique_ptr<runtime::Layer>> layers;
        layers.push_back(layers::make_host_parameters(name, std::move(parameters)));
        return std::make_shared<runtime::Pipeline>(name, std::move(layers), /*pinned=*/false);
      },
      py::arg("name"), py::arg("names"), py::arg("tensors"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace roundpipe::python
