#include <roundpipe/schedule/planner.h>
#include <roundpipe/simulate/simulator.h>

#include <torch/csrc/utils/pybind.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using namespace schedule;  // NOLINT: this file binds that namespace

void bind_schedule(py::module_& module) {
  py::enum_<PlanMode>(module, "PlanMode")
      .value("INFERENCE", PlanMode::kInference)
      .value("TRAIN", PlanMode::kTrain)
      .value("FUSED", PlanMode::kFused);
  py::class_<Range>(module, "Range")
      .def(py::init([](int first, int last) { return Range{first, last}; }), py::arg("first"), py::arg("last"))
      .def_readonly("first", &Range::first)
      .def_readonly("last", &Range::last);
  py::class_<Job>(module, "Job")
      .def_property_readonly("phase", [](const Job& job) { return phase_name(job.phase); })
      .def_readonly("layers", &Job::layers)
      .def_readonly("microbatches", &Job::microbatches)
      .def_readonly("device", &Job::device);
  py::class_<Plan>(module, "Plan")
      .def_readonly("layers", &Plan::layers)
      .def_readonly("microbatches", &Plan::microbatches)
      .def_readonly("devices", &Plan::devices)
      .def_readonly("jobs", &Plan::jobs);
  py::class_<Stages>(module, "Stages")
      .def(py::init<>())
      .def_readwrite("forward", &Stages::forward)
      .def_readwrite("backward", &Stages::backward);
  module.def(
      "simulate_plan",
      [](const Plan& plan, const std::vector<double>& forward_ms, const std::vector<double>& backward_ms,
         double hop_latency_ms, int steps, bool asynchronous) {
        LayerCosts costs(forward_ms.size());
        for (size_t i = 0; i < costs.size(); ++i) {
          costs[i].forward_ms = forward_ms[i];
          costs[i].backward_ms = backward_ms.at(i);
        }
        Cluster cluster;
        cluster.devices.resize(static_cast<size_t>(plan.devices));
        cluster.hop_latency_ms = hop_latency_ms;
        simulate::SimulateOptions options;
        options.steps = steps;
        options.asynchronous = asynchronous;
        const simulate::Timeline timeline = simulate::simulate(plan, costs, cluster, options);
        py::dict result;
        result["makespan_ms"] = timeline.makespan_ms;
        result["steady_step_ms"] = timeline.steady_step_ms;
        result["bubble"] = timeline.bubble;
        return result;
      },
      py::arg("plan"), py::arg("forward_ms"), py::arg("backward_ms"), py::arg("hop_latency_ms") = 0.0,
      py::arg("steps") = 1, py::arg("asynchronous") = true,
      "Predicted times of a plan: makespan_ms, steady_step_ms, bubble (1 - busy / (devices * makespan)).");
}

}  // namespace roundpipe::python
