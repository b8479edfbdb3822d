#include <functional>
#include <optional>

#include <roundpipe/core/engine_life.h>
#include <roundpipe/core/skipped_steps.h>
#include <roundpipe/layers/emulated_layer.h>
#include <roundpipe/runtime/model/layer_sizes.h>
#include <roundpipe/runtime/pipeline.h>
#include <roundpipe/training/scale_moves.h>

#include "bindings.h"
#include "models/model_layer.h"
#include "python_layer.h"
#include "python_values.h"

namespace roundpipe::python {

namespace py = pybind11;
using runtime::Engine;
using runtime::ExecutionRecord;
using runtime::LossScale;
using runtime::Pipeline;

namespace {

// Makes a native layer for an object that describes one, else a Python layer. REQUIRES: the interpreter lock.
std::unique_ptr<runtime::Layer> make_layer(const py::handle& object) {
  if (py::hasattr(object, "emulated")) {
    const py::object spec = object.attr("emulated");
    layers::EmulatedLayerOptions options;
    options.forward_ms = spec.attr("forward_ms").cast<double>();
    options.backward_ms = spec.attr("backward_ms").cast<double>();
    options.update_ms = spec.attr("update_ms").cast<double>();
    options.weight = spec.attr("weight").cast<at::Tensor>();
    if (!spec.attr("frozen").is_none()) options.frozen = spec.attr("frozen").cast<at::Tensor>();
    options.structure = make_structure(object.attr("structure"));
    return layers::make_emulated_layer(object.attr("name").cast<std::string>(), std::move(options));
  }
  return make_model_layer(py::reinterpret_borrow<py::object>(object));
}

// Deletes the pipeline without the interpreter lock, which threads of the engine may need that end with the pipeline's
// pool. In a process that is left behind, the memory is leaked.
void drop(Pipeline* pipeline) {
  if (is_left_behind()) return;
  std::optional<py::gil_scoped_release> unlocked;
  if (PyGILState_Check() != 0) unlocked.emplace();
  delete pipeline;
}

// What the user has of a model in the pipeline: once it is gone, another model may have the parameters.
struct Front {
  explicit Front(std::shared_ptr<Pipeline> of) : pipeline(std::move(of)) {}
  ~Front() { pipeline->release(); }
  Front(const Front&) = delete;
  Front& operator=(const Front&) = delete;
  const std::shared_ptr<Pipeline> pipeline;
};

using Pipelines = std::vector<std::shared_ptr<Pipeline>>;

std::vector<LossScale::ModelPtr> models_of(const Pipelines& pipelines) {
  std::vector<LossScale::ModelPtr> models;
  for (const std::shared_ptr<Pipeline>& pipeline : pipelines) models.push_back(pipeline->model().loss_scales);
  return models;
}

struct LaterScale {
  std::function<ScaleState()> state;
};

// Tensors are copied on the way in and out: one that Python has seen takes the interpreter lock when it is dropped.
std::optional<at::Tensor> seen(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional(tensor) : std::nullopt;
}

void bind_loss_scale(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  ValueClass<ScaleState>(module, "ScaleState")
      .attribute("scale", &ScaleState::scale)
      .attribute("front", &ScaleState::front)
      .attribute("growth_tracker", &ScaleState::growth_tracker);
  py::class_<ScaleRule>(module, "ScaleRule")
      .def(py::init([](double growth_factor, double backoff_factor, int64_t growth_interval) {
             return ScaleRule{growth_factor, backoff_factor, growth_interval};
           }),
           py::arg("growth_factor"), py::arg("backoff_factor"), py::arg("growth_interval"));
  py::class_<LaterScale>(module, "LaterScale")
      .def("__call__", [](const LaterScale& later) { return later.state(); }, unlocked);
  py::class_<LossScale, std::shared_ptr<LossScale>>(module, "LossScale")
      .def("use", [](LossScale& scale) { return scale.use().clone(); })
      .def("next", [](const LossScale& scale) { return scale.next().clone(); })
      .def(
          "belong_to", [](LossScale& scale, const Pipelines& pipelines) { scale.belong_to(models_of(pipelines)); },
          py::arg("pipelines"))
      .def("stepped_outside", &LossScale::stepped_outside, py::arg("losses"))
      .def("outside_losses", &LossScale::outside_losses)
      .def(
          "restart", [](LossScale& scale, const at::Tensor& next) { scale.restart(next.detach().clone()); },
          py::arg("scale"))
      .def("waiting_or_next", [](const LossScale& scale) { return scale.waiting_or_next().clone(); });
  py::class_<ScaleMoves, LossScale, std::shared_ptr<ScaleMoves>>(module, "ScaleMoves")
      .def(py::init<>())
      .def("start", &ScaleMoves::start, py::arg("scale"), py::arg("growth_tracker"))
      .def_property_readonly("started", &ScaleMoves::started)
      .def_property_readonly("current", [](const ScaleMoves& moves) { return seen(moves.current()); })
      .def_property_readonly("growth_tracker", [](const ScaleMoves& moves) { return seen(moves.growth_tracker()); })
      .def_property("moves_outside", &ScaleMoves::moves_outside, &ScaleMoves::set_moves_outside)
      .def(
          "begin_step",
          [](ScaleMoves& moves, const Pipelines& pipelines, bool several_nodes) {
            return moves.begin_step(pipelines, several_nodes).clone();
          },
          py::arg("pipelines"), py::arg("several_nodes"), unlocked)
      .def("stepped", py::overload_cast<const Pipelines&>(&ScaleMoves::stepped), py::arg("pipelines"))
      .def(
          "stepped_by",
          [](ScaleMoves& moves, const Pipelines& pipelines, std::shared_ptr<runtime::StepRun> run,
             const at::Tensor& used, const ScaleRule& rule,
             bool overflowed) { moves.stepped(pipelines, std::move(run), used.detach().clone(), rule, overflowed); },
          py::arg("pipelines"), py::arg("run"), py::arg("used"), py::arg("rule"), py::arg("overflowed"))
      .def(
          "decided",
          [](ScaleMoves& moves, const at::Tensor& before, const at::Tensor& used, double backoff_factor) {
            moves.decided(before.detach().clone(), used, backoff_factor);
          },
          py::arg("before"), py::arg("used"), py::arg("backoff_factor"))
      .def("move_outside", &ScaleMoves::move_outside)
      .def("advance", &ScaleMoves::advance)
      .def("restart_losses", &ScaleMoves::restart_losses)
      .def("finish_steps", &ScaleMoves::finish_steps, unlocked)
      .def("settle", py::overload_cast<const Pipelines&>(&ScaleMoves::settle), py::arg("pipelines"), unlocked)
      .def("later_state", [](const ScaleMoves& moves) { return LaterScale{moves.later_state()}; });
  py::class_<SkippedSteps>(module, "SkippedSteps")
      .def(py::init<int64_t>(), py::arg("before") = 0)
      .def("add", &SkippedSteps::add, py::arg("step"), py::arg("skipped"), py::arg("scale"))
      .def_property_readonly("count", &SkippedSteps::count);
}

}  // namespace

void bind_pipeline(py::module_& module) {
  py::enum_<runtime::TiedGradAccumulation>(module, "TiedGradAccumulation")
      .value("LAYER", runtime::TiedGradAccumulation::kLayer)
      .value("MICROBATCH", runtime::TiedGradAccumulation::kMicrobatch);
  py::class_<RunOptions>(module, "RunOptions")
      .def(py::init<>())
      .def_readwrite("requires_grad", &RunOptions::requires_grad)
      .def_readwrite("preserve_rng_state", &RunOptions::preserve_rng_state)
      .def_readwrite("recompute_grain", &RunOptions::recompute_grain)
      .def_readwrite("tied_grad_accumulation", &RunOptions::tied_grad_accumulation)
      .def_readwrite("gradient_groups", &RunOptions::gradient_groups)
      .def_readwrite("fault_tolerant", &RunOptions::fault_tolerant)
      .def_readwrite("verify_every", &RunOptions::verify_every)
      .def_readwrite("route", &RunOptions::route);
  module.def("default_microbatches", &default_microbatches, py::arg("devices"));
  ValueClass<ExecutionRecord>(module, "Record")
      .attribute("phase", [](const ExecutionRecord& record) { return schedule::phase_name(record.phase); })
      .attribute("layers", &ExecutionRecord::layers)
      .attribute("microbatch", &ExecutionRecord::microbatch)
      .attribute("device", &ExecutionRecord::device)
      .attribute("start_ms", &ExecutionRecord::start_ms)
      .attribute("end_ms", &ExecutionRecord::end_ms)
      .attribute("recomputed_ms", &ExecutionRecord::recomputed_ms)
      .attribute("waited_ms", &ExecutionRecord::waited_ms);
  py::class_<runtime::ExecutionLog, std::shared_ptr<runtime::ExecutionLog>>(module, "ExecutionLog")
      .def("records", &runtime::ExecutionLog::records);

  using runtime::MeasuredMachine, runtime::MeasuredStep, runtime::LinkRates;
  ValueClass<LinkRates>(module, "LinkRates")
      .attribute("up_gb_per_s", &LinkRates::up_gb_per_s)
      .attribute("down_gb_per_s", &LinkRates::down_gb_per_s);
  ValueClass<MeasuredMachine>(module, "MeasuredMachine")
      .attribute("devices",
                 [](const MeasuredMachine& machine) {
                   std::vector<std::pair<double, int64_t>> devices;
                   for (const schedule::ClusterDevice& device : machine.cluster.devices)
                     devices.emplace_back(device.speed, device.memory_bytes);
                   return devices;
                 })
      .attribute("links", &MeasuredMachine::links)
      .attribute("link_up_gb_per_s", [](const MeasuredMachine& machine) { return machine.cluster.link_up_gb_per_s; })
      .attribute("link_down_gb_per_s",
                 [](const MeasuredMachine& machine) { return machine.cluster.link_down_gb_per_s; })
      .attribute("host_gb_per_s", [](const MeasuredMachine& machine) { return machine.cluster.host_gb_per_s; })
      .attribute("hop_latency_ms", [](const MeasuredMachine& machine) { return machine.cluster.hop_latency_ms; })
      .attribute("update_gb_per_s", &MeasuredMachine::update_gb_per_s)
      .attribute("chunk_bytes", &MeasuredMachine::chunk_bytes)
      .attribute("priorities", &MeasuredMachine::priorities);
  ValueClass<MeasuredStep>(module, "MeasuredStep")
      .attribute("microbatches", &MeasuredStep::microbatches)
      .attribute("start_ms", &MeasuredStep::start_ms)
      .attribute("end_ms", &MeasuredStep::end_ms)
      .attribute("busy_ms", &MeasuredStep::busy_ms);

  bind_loss_scale(module);
  py::class_<Front>(module, "Front").def(py::init<std::shared_ptr<Pipeline>>(), py::arg("pipeline"));
  using runtime::ParameterClaim;
  py::class_<ParameterClaim>(module, "StepClaim")
      .def(py::init([](std::string model, const std::vector<std::pair<std::string, at::Tensor>>& parameters) {
             ParameterClaim::Named named;
             for (const auto& [name, tensor] : parameters) named.push_back({name, tensor});
             ParameterClaim::require_free(ParameterClaim::To::kSteps, model, named);
             return std::make_unique<ParameterClaim>(ParameterClaim::To::kSteps, std::move(model), std::move(named));
           }),
           py::arg("model"), py::arg("parameters"));
  module.def("any_claimed", &runtime::ParameterClaim::any_claimed, py::arg("parameters"));

  py::class_<Pipeline, std::shared_ptr<Pipeline>>(module, "Pipeline")
      .def(py::init([](std::string name, const py::list& layers, bool pinned, const Pipeline* in_place_of) {
             std::vector<std::unique_ptr<runtime::Layer>> made;
             for (const py::handle layer : layers) made.push_back(make_layer(layer));
             const py::gil_scoped_release no_gil;
             return std::shared_ptr<Pipeline>(new Pipeline(std::move(name), std::move(made), pinned, in_place_of),
                                              drop);
           }),
           py::arg("name"), py::arg("layers"), py::arg("pinned"), py::arg("in_place_of") = nullptr)
      .def("release", &Pipeline::release)
      .def("loss_scales", [](const Pipeline& pipeline) { return pipeline.model().loss_scales->all(); })
      .def(
          "has_loss_scale",
          [](const Pipeline& pipeline, const LossScale& scale) { return pipeline.model().loss_scales->has(scale); },
          py::arg("scale"))
      .def("wait_losses", &Pipeline::wait_losses, py::call_guard<py::gil_scoped_release>())
      .def("raise_pending", &Pipeline::raise_pending, py::call_guard<py::gil_scoped_release>())
      .def("drain", &Pipeline::drain, py::call_guard<py::gil_scoped_release>())
      .def(
          "show_gradients", [](Pipeline& pipeline) { pipeline.gradients().show(); },
          py::call_guard<py::gil_scoped_release>())
      .def_property_readonly("has_gradients", [](Pipeline& pipeline) { return pipeline.gradients().any(); })
      .def_property(
          "exposes_gradients", [](Pipeline& pipeline) { return pipeline.gradients().shows_at_once(); },
          [](Pipeline& pipeline, bool exposes) { pipeline.gradients().set_shows_at_once(exposes); })
      .def(
          "stage_limit_bytes",
          [](const Pipeline& pipeline, int64_t limit_bytes) {
            return pipeline.planner().stage_limit_bytes(*Engine::current(), limit_bytes);
          },
          py::arg("limit_bytes"), py::call_guard<py::gil_scoped_release>())
      .def(
          "planned_stages",
          [](const Pipeline& pipeline, schedule::PlanMode mode, int microbatches) {
            return pipeline.planner().stages(*Engine::current(), mode, microbatches);
          },
          py::arg("mode"), py::arg("microbatches"), py::call_guard<py::gil_scoped_release>())
      .def("costs", [](const Pipeline& pipeline) { return pipeline.planner().costs(); })
      .def("knows_costs", [](const Pipeline& pipeline) { return pipeline.planner().knows_costs(); })
      .def(
          "machine", [](const Pipeline& pipeline) { return pipeline.planner().machine(*Engine::current()); },
          py::call_guard<py::gil_scoped_release>())
      .def("measured_steps", [](const Pipeline& pipeline) { return pipeline.planner().steps(); })
      .def("busy_share", &Pipeline::busy_share, py::call_guard<py::gil_scoped_release>())
      .def(
          "planned",
          [](const Pipeline& pipeline, const schedule::Plan& plan) {
            return pipeline.planner().cut_of(plan).has_value();
          },
          py::arg("plan"))
      .def(
          "notation",
          [](const Pipeline& pipeline, const schedule::Plan& plan) {
            const schedule::Stages stages{plan.forward_stages(), plan.backward_stages()};
            return to_string(pipeline.planner().cut_of(plan).value_or(schedule::to_cut(stages)));
          },
          py::arg("plan"))
      .def("last_step_plan", &Pipeline::last_step_plan)
      .def("last_step_groups", &Pipeline::last_step_groups)
      .def("layer_bytes", [](const Pipeline& pipeline) { return runtime::layer_sizes(pipeline.model()); })
      .def_property_readonly("asynchronous", [](const Pipeline& pipeline) { return pipeline.planner().asynchronous(); })
      .def("block_parameters",
           [](const Pipeline& pipeline) {
             std::vector<std::vector<at::Tensor>> blocks;
             for (const runtime::BlockState& block : pipeline.model().blocks) {
               auto& members = blocks.emplace_back();
               for (const memory::NamedTensor& parameter : block.block->parameters())
                 members.push_back(parameter.tensor);
             }
             return blocks;
           })
      .def(
          "partial_sum_bytes",
          [](const Pipeline& pipeline, const schedule::Plan& plan, int gradient_groups,
             runtime::TiedGradAccumulation tied) {
            return runtime::partial_sum_bytes(pipeline.model(), plan, gradient_groups, tied);
          },
          py::arg("plan"), py::arg("gradient_groups"), py::arg("tied_grad_accumulation"))
      .def("host_bytes", [](const Pipeline& pipeline) { return pipeline.model().host_bytes(); })
      .def("verified_jobs", [](const Pipeline& pipeline) { return pipeline.model().verified_jobs.load(); })
      .def_property("random_seed", &Pipeline::random_seed, &Pipeline::set_random_seed)
      .def_property("calls", &Pipeline::calls, &Pipeline::set_calls)
      .def("last_plan", &Pipeline::last_plan)
      .def("last_log", &Pipeline::last_log)
      .def_property_readonly("kept_calls", [](const Pipeline&) { return Pipeline::kKeptLogs; })
      .def("recent_logs", &Pipeline::recent_logs)
      .def("last_records", &Pipeline::last_records);
}

}  // namespace roundpipe::python
