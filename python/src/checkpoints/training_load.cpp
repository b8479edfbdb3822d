#include <roundpipe/runs/random_states.h>
#include <roundpipe/runs/training_load.h>

#include "bindings.h"
#include "state_values.h"

namespace roundpipe::python {

namespace py = pybind11;

namespace {

LoadWords words_of_python() {
  return {.weights_only = "give weights_only=True",
          .scaler = "scaler=",
          .disabled_scaler = "a disabled one; make it with enabled=False",
          .schedules_before = "learning-rate schedulers and ",
          .schedules_after = " were given, expected as many",
          .same_parameters = "the same in the same order",
          .microbatches = "num_microbatch"};
}

// The options of a group, None at a load, and its parameters.
using Group = std::pair<py::object, std::vector<at::Tensor>>;

TrainedOptimizer make_optimizer(const std::string& class_name, const std::string& moments,
                                const std::vector<Group>& groups) {
  TrainedOptimizer made{class_name, moments, {}};
  for (const auto& [options, parameters] : groups)
    made.groups.push_back({state_value(options, TrainingLoad::group_path(made.groups.size())), parameters});
  return made;
}

void bind_parts(py::module_& module) {
  py::class_<ModelNames>(module, "ModelNames")
      .def(py::init([](const NamedParameters& named, const NamedParameters& named_buffers,
                       const std::optional<ModelNames::NamesInFile>& adapter) {
             return ModelNames(named, named_buffers, {}, adapter);
           }),
           py::arg("parameters"), py::arg("buffers"), py::arg("adapter"));
  py::class_<TrainedModel>(module, "TrainedModel")
      .def(py::init([](const std::string& path, std::shared_ptr<runtime::Pipeline> pipeline, const std::string& name,
                       std::optional<int> microbatches, std::optional<int64_t> chunk_logit_bytes,
                       const std::string& arithmetic) {
             return TrainedModel{path, std::move(pipeline), name, microbatches, chunk_logit_bytes, arithmetic};
           }),
           py::arg("path"), py::arg("pipeline"), py::arg("name"), py::arg("microbatches"), py::arg("chunk_logit_bytes"),
           py::arg("arithmetic"));
  py::class_<TrainedOptimizer>(module, "TrainedOptimizer")
      .def(py::init(&make_optimizer), py::arg("class_name"), py::arg("moments"), py::arg("groups"));
  py::class_<FusedOptimizer>(module, "FusedOptimizer")
      .def(py::init([](std::shared_ptr<runtime::ModelOptimizer> core, optim::Algorithm algorithm,
                       optim::MomentFormat moments, const std::vector<optim::Hyperparameters>& options) {
             return FusedOptimizer{std::move(core), algorithm, moments, options};
           }),
           py::arg("core"), py::arg("algorithm"), py::arg("moments"), py::arg("options"));
}

// Reads a value without the interpreter lock.
template <typename Read>
py::object read_value(Read read) {
  StateValue value;
  {
    const py::gil_scoped_release unlocked;
    value = read();
  }
  return python_value(value);
}

std::unique_ptr<TrainingLoad> make_load(const std::string& folder, ModelNames names, std::vector<TrainedModel> models,
                                        std::vector<std::shared_ptr<runtime::Pipeline>> pipelines,
                                        std::optional<TrainedOptimizer> optimizer, bool is_fused, size_t schedules,
                                        bool has_scaler, bool scales, std::vector<std::string> takers, int64_t rank,
                                        int64_t size, bool strict, bool weights_only) {
  const py::gil_scoped_release unlocked;
  return std::make_unique<TrainingLoad>(folder, LoadedTraining{.names = std::move(names),
                                                               .models = std::move(models),
                                                               .pipelines = std::move(pipelines),
                                                               .optimizer = std::move(optimizer),
                                                               .is_fused = is_fused,
                                                               .schedules = schedules,
                                                               .has_scaler = has_scaler,
                                                               .scales = scales,
                                                               .takers = std::move(takers),
                                                               .rank = rank,
                                                               .size = size,
                                                               .strict = strict,
                                                               .weights_only = weights_only,
                                                               .words = words_of_python()});
}

py::dict values(const TrainingLoad& load) {
  std::vector<std::pair<std::string, StateValue>> found;
  {
    const py::gil_scoped_release unlocked;
    found = load.values();
  }
  py::dict values;
  for (const auto& [name, value] : found) values[py::str(name)] = python_value(value);
  return values;
}

// What the models go on with, and lines for the user.
std::pair<std::vector<LoadedModel>, std::vector<std::string>> load_rest(TrainingLoad& load) {
  std::vector<std::string> lines;
  std::vector<LoadedModel> loaded = load.load_rest([&](const std::string& line) { lines.push_back(line); });
  return {std::move(loaded), std::move(lines)};
}

}  // namespace

void bind_training_load(py::module_& module) {
  bind_parts(module);
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  ValueClass<LoadedModel>(module, "LoadedModel")
      .attribute("microbatches", &LoadedModel::microbatches)
      .attribute("chunk_logit_bytes", &LoadedModel::chunk_logit_bytes)
      .attribute("seed_is_another_s", &LoadedModel::seed_is_another_s);
  py::class_<TrainingLoad>(module, "TrainingLoad")
      .def(py::init(&make_load), py::arg("folder"), py::arg("names"), py::arg("models"), py::arg("pipelines"),
           py::arg("optimizer"), py::arg("is_fused"), py::arg("schedules"), py::arg("has_scaler"), py::arg("scales"),
           py::arg("takers"), py::arg("rank"), py::arg("size"), py::arg("strict"), py::arg("weights_only"))
      .def_property_readonly("step", &TrainingLoad::step)
      .def_property_readonly("steps", &TrainingLoad::steps)
      .def_property_readonly("nodes", [](const TrainingLoad& load) { return load.stored().nodes(); })
      .def_property_readonly("missing", [](const TrainingLoad& load) { return load.places().missing(); })
      .def_property_readonly("unexpected", [](const TrainingLoad& load) { return load.places().unexpected(); })
      .def(
          "group_options",
          [](TrainingLoad& load, size_t group) { return read_value([&] { return load.group_options(group); }); },
          py::arg("group"))
      .def("optimizer_state", [](TrainingLoad& load) { return read_value([&] { return load.optimizer_state(); }); })
      .def(
          "schedule", [](TrainingLoad& load, size_t index) { return read_value([&] { return load.schedule(index); }); },
          py::arg("index"))
      .def("scaler", [](const TrainingLoad& load) { return python_value(load.scaler()); })
      .def("random", [](const TrainingLoad& load) { return python_value(load.random()); })
      .def("values", &values)
      .def_property_readonly("has_random_states",
                             [](const TrainingLoad& load) { return load.own().has_random_states(); })
      .def("loss_counts", [](const TrainingLoad& load) { return load.own().loss_counts().dump(); })
      .def("load_weights", &TrainingLoad::load_weights, py::arg("fused"), unlocked)
      .def("load_fused", py::overload_cast<const FusedOptimizer&>(&TrainingLoad::load), py::arg("fused"), unlocked)
      .def("load_copies", py::overload_cast<CopySteps*>(&TrainingLoad::load), py::arg("copies"), unlocked)
      .def("load_rest", &load_rest, unlocked)
      .def("restore_random_states", [](const TrainingLoad& load) { restore_random_states(load.random()); }, unlocked);
}

}  // namespace roundpipe::python
