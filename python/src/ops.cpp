#include <roundpipe/core/loss_chunks.h>
#include <roundpipe/kernels/card/program.h>
#include <roundpipe/kernels/kernels.h>
#include <roundpipe/kernels/launcher.h>
#include <roundpipe/ops/chunked_mlp.h>
#include <roundpipe/ops/linear_cross_entropy.h>
#include <roundpipe/ops/packed_attention.h>

#include "bindings.h"
#include "interpreter_lock.h"
#include "python_values.h"

namespace roundpipe::python {

namespace py = pybind11;
using namespace ops;

namespace {

// REQUIRES: the interpreter lock. The returned body takes the lock itself, for each call.
TokenwiseBody python_body(py::object callable) {
  return [callable = share(std::move(callable))](const at::Tensor& tokens) {
    const InterpreterLock lock;
    try {
      return object_of(callable)(tokens).cast<at::Tensor>();
    } catch (py::error_already_set& raised) {
      throw_python_error(raised);
    } catch (const py::cast_error&) {
      throw std::invalid_argument(
          "[chunked_mlp] the body did not return a tensor; it has to return one for each chunk");
    }
  };
}

void bind_linear_cross_entropy(py::module_& module) {
  py::enum_<LogitStep::Kind>(module, "LogitStepKind")
      .value("MULTIPLY", LogitStep::Kind::kMultiply)
      .value("DIVIDE", LogitStep::Kind::kDivide)
      .value("TANH", LogitStep::Kind::kTanh)
      .value("FLOAT32", LogitStep::Kind::kFloat32);
  py::class_<LogitStep>(module, "LogitStep")
      .def(py::init([](LogitStep::Kind kind, double value) { return LogitStep{kind, value}; }), py::arg("kind"),
           py::arg("value") = LogitStep{}.value)
      .def_readonly("kind", &LogitStep::kind)
      .def_readonly("value", &LogitStep::value);
  py::class_<LinearCrossEntropyOptions>(module, "LinearCrossEntropyOptions")
      .def(py::init<>())
      .def_readwrite("ignore_index", &LinearCrossEntropyOptions::ignore_index)
      .def_readwrite("chunk_tokens", &LinearCrossEntropyOptions::chunk_tokens)
      .def_readwrite("chunk_logit_bytes", &LinearCrossEntropyOptions::chunk_logit_bytes)
      .def_readwrite("steps", &LinearCrossEntropyOptions::steps)
      .def_property(
          "arithmetic",
          [](const LinearCrossEntropyOptions& options) { return std::string(arithmetic_name(options.arithmetic)); },
          [](LinearCrossEntropyOptions& options, const std::string& name) {
            options.arithmetic = parse_arithmetic(name);
          });
  module.def(
      "chunk_logit_bytes",
      [](const std::string& device) { return roundpipe::chunk_logit_bytes(c10::Device(device).is_cpu()); },
      py::arg("device"));
  module.def("softcap_steps", &softcap_steps, py::arg("cap"));
  module.def(
      "linear_cross_entropy",
      [](const at::Tensor& hidden, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
         const at::Tensor& labels, const LinearCrossEntropyOptions& options) {
        return linear_cross_entropy(hidden, weight, bias, labels, options).sum;
      },
      py::arg("hidden"), py::arg("weight"), py::arg("bias"), py::arg("labels"), py::arg("options"),
      py::call_guard<py::gil_scoped_release>());
  module.def("linear_cross_entropy_of_tokens", &linear_cross_entropy_of_tokens, py::arg("hidden"), py::arg("weight"),
             py::arg("bias"), py::arg("labels"), py::arg("options"), py::call_guard<py::gil_scoped_release>());
}

void bind_kernels(py::module_& module) {
  module.def("check_arithmetic", [](const std::string& name) { parse_arithmetic(name); }, py::arg("name"));
  module.attr("DEFAULT_ARITHMETIC") = std::string(arithmetic_name(kDefaultArithmetic));
  module.def("card_source", [] { return std::string(kernels::card_source()); });
  module.def(
      "card_program",
      [](const std::string& architecture) {
        using kernels::card::ProgramCache;
        const std::string program = [&] {
          const py::gil_scoped_release release;
          const ProgramCache cache(ProgramCache::folder_of_environment());
          return program_for(kernels::card::Compiler::nvrtc(), architecture, cache);
        }();
        return py::bytes(program);
      },
      py::arg("architecture"));
  module.def(
      "why_no_kernels", [](const std::string& device) { return kernels::why_no_kernels(c10::Device(device)); },
      py::arg("device"), py::call_guard<py::gil_scoped_release>());
}

void bind_chunked_mlp(py::module_& module) {
  py::class_<ChunkedMapOptions>(module, "ChunkedMapOptions")
      .def(py::init<>())
      .def_readwrite("chunk_tokens", &ChunkedMapOptions::chunk_tokens)
      .def_readwrite("dim", &ChunkedMapOptions::dim)
      .def_readwrite("preserve_rng_state", &ChunkedMapOptions::preserve_rng_state);
  module.def(
      "chunked_map",
      [](py::object callable, const at::Tensor& input, const std::vector<at::Tensor>& parameters,
         const ChunkedMapOptions& options) {
        const TokenwiseBody body = python_body(std::move(callable));
        const py::gil_scoped_release unlocked;
        return chunked_map(body, input, parameters, options);
      },
      py::arg("body"), py::arg("input"), py::arg("parameters"), py::arg("options"));
  py::class_<Projection>(module, "Projection")
      .def(py::init([](const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
             return Projection{weight, bias};
           }),
           py::arg("weight"), py::arg("bias") = std::nullopt);
  module.def(
      "gated_mlp",
      [](const at::Tensor& input, const Projection& gate, const Projection& up, const Projection& down,
         const std::string& activation,
         int64_t chunk_tokens) { return gated_mlp(input, gate, up, down, parse_activation(activation), chunk_tokens); },
      py::arg("input"), py::arg("gate"), py::arg("up"), py::arg("down"), py::arg("activation"), py::arg("chunk_tokens"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "two_layer_mlp",
      [](const at::Tensor& input, const Projection& up, const Projection& down, const std::string& activation,
         int64_t chunk_tokens) { return two_layer_mlp(input, up, down, parse_activation(activation), chunk_tokens); },
      py::arg("input"), py::arg("up"), py::arg("down"), py::arg("activation"), py::arg("chunk_tokens"),
      py::call_guard<py::gil_scoped_release>());
}

void bind_documents(py::module_& module) {
  py::class_<Documents, std::shared_ptr<Documents>>(module, "Documents")
      .def_readonly("window", &Documents::window)
      .def_readonly("rows", &Documents::rows)
      .def(
          "with_window",
          [](const Documents& documents, int64_t window) {
            return std::make_shared<Documents>(with_window(documents, window));
          },
          py::arg("window"))
      .def("has_inner_padding", &has_inner_padding);
  module.def(
      "find_documents",
      [](const std::optional<at::Tensor>& attention_mask, const std::optional<at::Tensor>& positions, int64_t rows,
         int64_t tokens, const std::optional<at::Tensor>& labels) {
        return find_documents(attention_mask.value_or(at::Tensor()), positions.value_or(at::Tensor()), rows, tokens,
                              labels.value_or(at::Tensor()));
      },
      py::arg("attention_mask"), py::arg("positions"), py::arg("rows"), py::arg("tokens"),
      py::arg("labels") = std::nullopt, py::call_guard<py::gil_scoped_release>());
  module.def("read_documents", &read_documents, py::arg("table"), py::arg("positions"), py::arg("rows"),
             py::arg("tokens"), py::call_guard<py::gil_scoped_release>());
}

void bind_packed_attention(py::module_& module) {
  module.attr("QUERIES_AT_ONCE") = PackedAttentionOptions{}.queries_at_once;
  module.def(
      "packed_attention",
      [](const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const Documents& documents,
         double dropout, std::optional<double> scaling, std::optional<double> softcap,
         const std::optional<at::Tensor>& sinks, int64_t queries_at_once) {
        return packed_attention(query, key, value, documents, {dropout, scaling, softcap, sinks, queries_at_once});
      },
      py::arg("query"), py::arg("key"), py::arg("value"), py::arg("documents"), py::arg("dropout"), py::arg("scaling"),
      py::arg("softcap"), py::arg("sinks"), py::arg("queries_at_once"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace

void bind_ops(py::module_& module) {
  bind_documents(module);
  bind_packed_attention(module);
  bind_linear_cross_entropy(module);
  bind_kernels(module);
  bind_chunked_mlp(module);
}

}  // namespace roundpipe::python
