#include <optional>

#include <roundpipe/optim/dispatch.h>
#include <roundpipe/optim/masters.h>
#include <roundpipe/optim/muon_parameters.h>
#include <roundpipe/optim/parameter_update.h>
#include <roundpipe/optim/thread_pool.h>
#include <roundpipe/optim/weight_decay.h>

#include "bindings.h"

namespace roundpipe::python {

namespace py = pybind11;
using namespace optim;

namespace {

at::Tensor tensor_or_none(const std::optional<at::Tensor>& tensor) { return tensor.value_or(at::Tensor()); }

void bind_values(py::module_& module) {
  py::enum_<Algorithm>(module, "Algorithm")
      .value("ADAM", Algorithm::kAdam)
      .value("ADAMW", Algorithm::kAdamW)
      .value("SGD", Algorithm::kSGD)
      .value("ADAGRAD", Algorithm::kAdagrad)
      .value("ADADELTA", Algorithm::kAdadelta)
      .value("ADAMAX", Algorithm::kAdamax)
      .value("NADAM", Algorithm::kNAdam)
      .value("RADAM", Algorithm::kRAdam)
      .value("RMSPROP", Algorithm::kRMSprop)
      .value("RPROP", Algorithm::kRprop)
      .value("ASGD", Algorithm::kASGD)
      .value("ADAFACTOR", Algorithm::kAdafactor)
      .value("LION", Algorithm::kLion)
      .value("MUON", Algorithm::kMuon);
  py::enum_<MomentFormat>(module, "MomentFormat")
      .value("FLOAT32", MomentFormat::kFloat32)
      .value("BLOCKWISE_8BIT", MomentFormat::kBlockwise8Bit);
  py::enum_<MasterFormat>(module, "MasterFormat")
      .value("FLOAT32", MasterFormat::kFloat32)
      .value("BITS_24", MasterFormat::k24Bit);
  py::class_<StateFormat>(module, "StateFormat")
      .def(py::init<MomentFormat, MasterFormat>(), py::arg("moments"), py::arg("masters"))
      .def_readonly("moments", &StateFormat::moments)
      .def_readonly("masters", &StateFormat::masters);
  py::class_<Hyperparameters>(module, "Hyperparameters")
      .def(py::init<>())
      .def(py::init<const Hyperparameters&>(), py::arg("other"))
      .def_readwrite("lr", &Hyperparameters::lr)
      .def_readwrite("beta1", &Hyperparameters::beta1)
      .def_readwrite("beta2", &Hyperparameters::beta2)
      .def_readwrite("eps", &Hyperparameters::eps)
      .def_readwrite("eps2", &Hyperparameters::eps2)
      .def_readwrite("weight_decay", &Hyperparameters::weight_decay)
      .def_readwrite("momentum", &Hyperparameters::momentum)
      .def_readwrite("dampening", &Hyperparameters::dampening)
      .def_readwrite("alpha", &Hyperparameters::alpha)
      .def_readwrite("rho", &Hyperparameters::rho)
      .def_readwrite("lr_decay", &Hyperparameters::lr_decay)
      .def_readwrite("momentum_decay", &Hyperparameters::momentum_decay)
      .def_readwrite("lambd", &Hyperparameters::lambd)
      .def_readwrite("t0", &Hyperparameters::t0)
      .def_readwrite("eta_minus", &Hyperparameters::eta_minus)
      .def_readwrite("eta_plus", &Hyperparameters::eta_plus)
      .def_readwrite("step_size_min", &Hyperparameters::step_size_min)
      .def_readwrite("step_size_max", &Hyperparameters::step_size_max)
      .def_readwrite("beta2_decay", &Hyperparameters::beta2_decay)
      .def_readwrite("clip_threshold", &Hyperparameters::clip_threshold)
      .def_readwrite("initial_accumulator_value", &Hyperparameters::initial_accumulator_value)
      .def_readwrite("ns_a", &Hyperparameters::ns_a)
      .def_readwrite("ns_b", &Hyperparameters::ns_b)
      .def_readwrite("ns_c", &Hyperparameters::ns_c)
      .def_readwrite("ns_steps", &Hyperparameters::ns_steps)
      .def_readwrite("nesterov", &Hyperparameters::nesterov)
      .def_readwrite("amsgrad", &Hyperparameters::amsgrad)
      .def_readwrite("maximize", &Hyperparameters::maximize)
      .def_readwrite("centered", &Hyperparameters::centered)
      .def_readwrite("decoupled_weight_decay", &Hyperparameters::decoupled_weight_decay)
      .def_readwrite("match_rms_adamw", &Hyperparameters::match_rms_adamw)
      .def_readwrite("use_muon", &Hyperparameters::use_muon);
  py::class_<Scalars>(module, "Scalars")
      .def(py::init<>())
      .def_readwrite("step", &Scalars::step)
      .def_readwrite("mu_product", &Scalars::mu_product)
      .def_readwrite("eta", &Scalars::eta)
      .def_readwrite("mu", &Scalars::mu);
  py::class_<ParameterState>(module, "ParameterState")
      .def(py::init([](const Scalars& scalars, std::vector<at::Tensor> tensors) {
             return ParameterState{scalars, std::move(tensors)};
           }),
           py::arg("scalars"), py::arg("tensors"))
      .def_readwrite("scalars", &ParameterState::scalars)
      .def_readwrite("tensors", &ParameterState::tensors);
}

void bind_updates(py::module_& module) {
  module.def(
      "has_weight_decay",
      [](const std::string& name, const std::vector<std::string>& classes) { return has_weight_decay(name, classes); },
      py::arg("name"), py::arg("classes"));
  module.def(
      "is_for_muon",
      [](const std::string& name, const std::vector<int64_t>& sizes, const std::vector<std::string>& classes) {
        return is_for_muon(name, sizes, classes);
      },
      py::arg("name"), py::arg("sizes"), py::arg("classes"));
  module.def("state_names", &state_names, py::arg("algorithm"), py::arg("hyper"), py::arg("format"), py::arg("sizes"));
  module.def(
      "make_state",
      [](Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format, const at::Tensor& parameter) {
        return make_state(algorithm, hyper, format, parameter);
      },
      py::arg("algorithm"), py::arg("hyper"), py::arg("format"), py::arg("parameter"),
      py::call_guard<py::gil_scoped_release>());
  module.def("state_bytes", &state_bytes, py::arg("algorithm"), py::arg("hyper"), py::arg("format"), py::arg("sizes"));
  module.def("update_traffic", &update_traffic, py::arg("algorithm"), py::arg("hyper"), py::arg("format"),
             py::arg("weights"));
  module.def(
      "update",
      [](Algorithm algorithm, const Hyperparameters& hyper, MomentFormat format, ParameterState& state,
         const at::Tensor& before, const at::Tensor& after, const std::optional<at::Tensor>& remainder,
         const std::optional<at::Tensor>& master, const at::Tensor& gradient, float inverse_scale, float clip) {
        update(algorithm, hyper, format, state, {before, after, tensor_or_none(remainder), tensor_or_none(master)},
               gradient, {inverse_scale, clip}, *ThreadPool::current());
      },
      py::arg("algorithm"), py::arg("hyper"), py::arg("format"), py::arg("state"), py::arg("before"), py::arg("after"),
      py::arg("remainder"), py::arg("master"), py::arg("gradient"), py::arg("inverse_scale") = 1.0F,
      py::arg("clip") = 1.0F, py::call_guard<py::gil_scoped_release>());
  module.def(
      "split",
      [](const at::Tensor& master, const at::Tensor& weight, const at::Tensor& remainder) {
        split(master, weight, remainder, *ThreadPool::current());
      },
      py::arg("master"), py::arg("weight"), py::arg("remainder"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "remainder_bytes",
      [](c10::ScalarType weights, MasterFormat masters) {
        const std::optional<c10::ScalarType> rest = remainder_dtype(weights, masters);
        return rest ? static_cast<int64_t>(c10::elementSize(*rest)) : 0;
      },
      py::arg("weights"), py::arg("masters"));
  module.def("convert_remainder", &convert_remainder, py::arg("source"), py::arg("target"),
             py::call_guard<py::gil_scoped_release>());
  module.def(
      "join",
      [](const at::Tensor& weight, const at::Tensor& remainder, const at::Tensor& master) {
        join(weight, remainder, master, *ThreadPool::current());
      },
      py::arg("weight"), py::arg("remainder"), py::arg("master"), py::call_guard<py::gil_scoped_release>());
}

void bind_machine(py::module_& module) {
  module.def("set_threads", &ThreadPool::set_current, py::arg("threads"), py::arg("pinned") = false,
             py::call_guard<py::gil_scoped_release>());
  module.def("threads", [] { return ThreadPool::current()->threads(); });
  module.def("instruction_sets", &instruction_sets);
  module.def("instruction_set", &instruction_set);
  module.def("set_instruction_set", &set_instruction_set, py::arg("name"));
}

}  // namespace

void bind_optim(py::module_& module) {
  bind_values(module);
  bind_updates(module);
  bind_machine(module);
}

}  // namespace roundpipe::python
