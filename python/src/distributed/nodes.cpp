#include <roundpipe/cluster/agreement.h>
#include <roundpipe/cluster/channel.h>
#include <roundpipe/cluster/nodes.h>
#include <roundpipe/cluster/process_groups.h>
#include <roundpipe/training/joint_training.h>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using cluster::Agreement;
using cluster::Control;

namespace {

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

std::vector<py::bytes> as_bytes(const std::vector<std::string>& texts) { return {texts.begin(), texts.end()}; }

}  // namespace

void bind_nodes(py::module_& module) {
  const auto unlocked = py::call_guard<py::gil_scoped_release>();
  module.def("differences", &cluster::differences, py::arg("told"));

  py::class_<Control, std::shared_ptr<Control>>(module, "Control")
      .def(py::init([](const std::string& group, double timeout_s) {
             return std::make_shared<Control>(cluster::process_group(group), milliseconds(timeout_s));
           }),
           py::arg("group"), py::arg("timeout_s"))
      .def_property_readonly("rank", &Control::rank)
      .def_property_readonly("size", &Control::size)
      .def_property_readonly("name", &Control::name)
      .def(
          "exchange",
          [](Control& control, const py::bytes& message) {
            const auto mine = std::string(message);
            std::vector<std::string> all;
            {
              const py::gil_scoped_release release;
              all = control.exchange(mine);
            }
            return as_bytes(all);
          },
          py::arg("message"));

  py::class_<Agreement, std::shared_ptr<Agreement>>(module, "Agreement")
      .def(py::init<std::shared_ptr<Control>, const std::string&>(), py::arg("control"), py::arg("model"))
      .def_property_readonly("rank", &Agreement::rank)
      .def_property_readonly("size", &Agreement::size)
      .def_property_readonly("model", &Agreement::model)
      .def(
          "gather",
          [](Agreement& agreement, const std::string& kind, const py::bytes& told) {
            const auto mine = std::string(told);
            std::vector<std::string> all;
            {
              const py::gil_scoped_release release;
              for (Agreement::Answer& answer : agreement.gather(kind, mine)) all.push_back(std::move(answer.told));
            }
            return as_bytes(all);
          },
          py::arg("kind"), py::arg("told"))
      .def("agree", &Agreement::agree, py::arg("kind"), py::arg("told"), py::arg("expected"), unlocked);

  py::class_<cluster::Nodes, std::shared_ptr<cluster::Nodes>>(module, "Nodes")
      .def(py::init([](const std::string& gradients, const std::string& weights, std::shared_ptr<Control> control,
                       double timeout_s) {
             return cluster::Nodes::of_names(gradients, weights, std::move(control), milliseconds(timeout_s));
           }),
           py::arg("gradients"), py::arg("weights"), py::arg("control"), py::arg("timeout_s"), unlocked)
      .def_property_readonly("rank", &cluster::Nodes::rank)
      .def_property_readonly("size", &cluster::Nodes::size)
      .def_static("drain_all", &cluster::Channel::drain_all, unlocked);

  py::class_<LossCounts, std::shared_ptr<LossCounts>>(module, "LossCounts")
      .def("note_users_loss", &LossCounts::note_users_loss)
      .def("forget", &LossCounts::forget)
      .def("tell_failure", &LossCounts::tell_failure, py::arg("error"), unlocked)
      .def("state",
           [](const LossCounts& counts) {
             const LossCounts::State state = counts.state();
             py::dict saved;
             saved["used"] = state.used;
             saved["items"] = state.items == 0 ? py::object(py::int_(0)) : py::object(py::float_(state.items));
             saved["labels"] = state.labels;
             return saved;
           })
      .def(
          "load",
          [](LossCounts& counts, const std::optional<py::dict>& saved) {
            if (!saved) return counts.load(std::nullopt);
            counts.load(LossCounts::State{(*saved)["used"].cast<std::optional<std::string>>(),
                                          (*saved)["items"].cast<double>(), (*saved)["labels"].cast<int64_t>()});
          },
          py::arg("state"));

  py::class_<CallCount>(module, "CallCount")
      .def(py::init<std::shared_ptr<LossCounts>>(), py::arg("counts"))
      .def("total", &CallCount::total, py::arg("labels"), py::arg("items"), unlocked)
      .def("note_users_loss", &CallCount::note_users_loss)
      .def("note_sum", &CallCount::note_sum)
      .def("note_failure", &CallCount::note_failure, py::arg("error"))
      .def_property_readonly("loss_factor", &CallCount::loss_factor)
      .def_property_readonly("share", &CallCount::share);

  py::class_<OptimizerTraits>(module, "OptimizerTraits")
      .def(py::init([](std::string kind, std::vector<cluster::Told> options,
                       std::vector<std::vector<at::Tensor>> parameters, cluster::Told format) {
             return OptimizerTraits{std::move(kind), std::move(options), std::move(parameters), std::move(format)};
           }),
           py::arg("kind"), py::arg("options"), py::arg("parameters"), py::arg("format"));

  py::class_<JointTraining>(module, "JointTraining")
      .def(py::init([](std::shared_ptr<Agreement> agreement, std::string version, std::string torch_version,
                       std::string kind, std::optional<int> layers) {
             return std::make_unique<JointTraining>(
                 std::move(agreement),
                 ModelTraits{std::move(version), std::move(torch_version), std::move(kind), layers});
           }),
           py::arg("agreement"), py::arg("version"), py::arg("torch_version"), py::arg("kind"), py::arg("layers"))
      .def_property_readonly("counts", &JointTraining::counts)
      .def("agree_on_model", &JointTraining::agree_on_model, py::arg("parameters"), py::arg("buffers"), unlocked)
      .def(
          "share_model",
          [](JointTraining& joint, const cluster::NamedTensors& named, const std::string& group) {
            joint.share_model(named, *cluster::process_group(group));
          },
          py::arg("named"), py::arg("group"), unlocked)
      .def("agree_on_optimizer", &JointTraining::agree_on_optimizer, py::arg("optimizer"), py::arg("parameters"),
           unlocked)
      .def(
          "share_parameters",
          [](JointTraining& joint, const std::string& group) {
            joint.share_parameters(*cluster::process_group(group));
          },
          py::arg("group"), unlocked)
      .def("step", &JointTraining::step, py::arg("options"), py::arg("groups"), py::arg("shows_weights"), unlocked);
}

}  // namespace roundpipe::python
