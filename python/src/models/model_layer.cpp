#include "models/model_layer.h"

#include <array>
#include <string>
#include <tuple>
#include <utility>

#include "bindings.h"
#include "interpreter_lock.h"
#include "models/passage.h"
#include "python_layer.h"

namespace roundpipe::python {

namespace py = pybind11;
using models::DecoderCall;
using models::DecoderConfig;
using models::MoeConfig;
using runtime::Values;

std::unique_ptr<runtime::Layer> make_model_layer(py::object object) {
  const py::object native = object.attr("native");
  if (native.is_none()) return make_python_layer(std::move(object));
  models::DecoderLayerParts parts;
  parts.names = native.attr("names").cast<std::vector<std::string>>();
  parts.config = [config = share(native.attr("config"))]() -> std::shared_ptr<const DecoderConfig> {
    const InterpreterLock lock;
    try {
      const py::object now = object_of(config)();
      if (now.is_none()) return nullptr;
      return now.cast<std::shared_ptr<DecoderConfig>>();
    } catch (py::error_already_set& raised) {
      throw_python_error(raised);
    }
  };
  parts.call = [number = native.attr("number").cast<size_t>()](const Values& inputs) -> const DecoderCall* {
    const PythonStructure* const structure = structure_of(inputs);
    return structure == nullptr || structure->passage == nullptr ? nullptr : structure->passage->call(number);
  };
  parts.general = make_python_layer(std::move(object));
  return models::make_decoder_layer(std::move(parts));
}

void bind_models(py::module_& module) {
  py::class_<MoeConfig>(module, "MoeConfig")
      .def(py::init([](int64_t top_k, const std::string& shares, const std::optional<std::string>& activation,
                       const std::optional<std::pair<double, double>>& clamped) {
             MoeConfig config;
             config.top_k = top_k;
             config.shares = models::parse_shares(shares);
             if (activation) config.activation = ops::parse_activation(*activation);
             if (clamped) config.clamped = {clamped->first, clamped->second};
             return config;
           }),
           py::kw_only(), py::arg("top_k"), py::arg("shares"), py::arg("activation"), py::arg("clamped"));
  py::class_<DecoderConfig, std::shared_ptr<DecoderConfig>>(module, "DecoderConfig")
      .def(py::init(
               [](int64_t head_dim, double scaling, double input_norm_eps, double post_norm_eps, double query_norm_eps,
                  double key_norm_eps, bool scales_norms_in_float, double attention_dropout, bool training,
                  const std::optional<std::string>& activation, const std::optional<MoeConfig>& moe,
                  const std::array<std::optional<std::tuple<double, double, bool>>, models::kAdaptable.size()>& lora) {
                 DecoderConfig config;
                 config.head_dim = head_dim;
                 config.scaling = scaling;
                 config.input_norm_eps = input_norm_eps;
                 config.post_norm_eps = post_norm_eps;
                 config.query_norm_eps = query_norm_eps;
                 config.key_norm_eps = key_norm_eps;
                 config.scales_norms_in_float = scales_norms_in_float;
                 config.attention_dropout = attention_dropout;
                 config.training = training;
                 if (activation) config.activation = ops::parse_activation(*activation);
                 if (moe) config.moe = *moe;
                 for (size_t i = 0; i < lora.size(); ++i) {
                   if (lora[i])
                     std::tie(config.lora[i].scaling, config.lora[i].dropout, config.lora[i].training) = *lora[i];
                 }
                 return std::make_shared<DecoderConfig>(config);
               }),
           py::kw_only(), py::arg("head_dim"), py::arg("scaling"), py::arg("input_norm_eps"), py::arg("post_norm_eps"),
           py::arg("query_norm_eps"), py::arg("key_norm_eps"), py::arg("scales_norms_in_float"),
           py::arg("attention_dropout"), py::arg("training"), py::arg("activation"), py::arg("moe"), py::arg("lora"));
  py::class_<DecoderCall>(module, "DecoderCall")
      .def(py::init([](int hidden, int cos, int sin, std::optional<int> mask, std::optional<int> positions,
                       const std::string& attention, const std::optional<std::string>& experts,
                       int64_t mlp_chunk_tokens, std::vector<int> outputs, size_t inputs) {
             DecoderCall call;
             call.hidden = hidden;
             call.cos = cos;
             call.sin = sin;
             call.mask = mask;
             call.positions = positions;
             call.attention = models::parse_attention(attention);
             if (experts) call.experts = models::parse_experts(*experts);
             call.mlp_chunk_tokens = mlp_chunk_tokens;
             call.outputs = std::move(outputs);
             call.inputs = inputs;
             return call;
           }),
           py::arg("hidden"), py::arg("cos"), py::arg("sin"), py::arg("mask"), py::arg("positions"),
           py::arg("attention"), py::arg("experts"), py::arg("mlp_chunk_tokens"), py::arg("outputs"),
           py::arg("inputs"));
  module.attr("ADAPTABLE") = py::cast(std::vector<std::string>(models::kAdaptable.begin(), models::kAdaptable.end()));
  module.attr("RESULT") = DecoderCall::kResult;
  module.attr("ROUTER_LOGITS") = DecoderCall::kRouterLogits;
  py::class_<Passage, std::shared_ptr<Passage>>(module, "Passage")
      .def(py::init<std::vector<std::optional<DecoderCall>>, py::object>(), py::arg("calls"),
           py::arg("structure_after"));
  module.def(
      "decode",
      [](const DecoderConfig& config, const std::vector<std::string>& names, const std::vector<at::Tensor>& weights,
         const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin, const std::optional<at::Tensor>& mask,
         const std::string& attention, int64_t mlp_chunk_tokens, const std::optional<at::Tensor>& positions,
         const std::optional<std::string>& experts) {
        models::DecoderInputs inputs;
        inputs.hidden = hidden;
        inputs.cos = cos;
        inputs.sin = sin;
        inputs.mask = mask;
        inputs.attention = models::parse_attention(attention);
        inputs.positions = positions;
        if (experts) inputs.experts = models::parse_experts(*experts);
        inputs.mlp_chunk_tokens = mlp_chunk_tokens;
        models::DecoderWeights found = models::find_decoder_weights(names, weights);
        models::set_lora(found, config.lora);
        return models::decode(config, found, inputs);
      },
      py::arg("config"), py::arg("names"), py::arg("weights"), py::arg("hidden"), py::arg("cos"), py::arg("sin"),
      py::arg("mask"), py::arg("attention"), py::arg("mlp_chunk_tokens") = 0, py::arg("positions") = std::nullopt,
      py::arg("experts") = std::nullopt, py::call_guard<py::gil_scoped_release>());
}

}  // namespace roundpipe::python
