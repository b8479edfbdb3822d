#include "models/model_layer.h"

#include <array>
#include <string>
#include <tuple>
#include <utility>

#include "bindings.h"
#include "models/passage.h"
#include "python_layer.h"

namespace roundpipe::python {

namespace py = pybind11;
using models::DecoderCall;
using models::DecoderConfig;
using models::EmbeddingCall;
using models::HeadCall;
using models::MoeConfig;
using runtime::Values;

namespace {

// The result of `function`, which is a Config or None.
template <typename Config>
std::function<std::shared_ptr<const void>()> config_from(py::object function) {
  return [function = share(std::move(function))]() -> std::shared_ptr<const void> {
    return in_python([&]() -> std::shared_ptr<const void> {
      const py::object now = object_of(function)();
      if (now.is_none()) return nullptr;
      return now.cast<std::shared_ptr<Config>>();
    });
  };
}

const Passage* passage_of(const Values& inputs) {
  const PythonStructure* const structure = structure_of(inputs);
  return structure == nullptr ? nullptr : structure->passage;
}

void make_decoder(models::NativeLayerParts& parts, const py::object& native) {
  parts.config = config_from<DecoderConfig>(native.attr("config"));
  const auto find = [number = native.attr("number").cast<size_t>()](const Values& inputs) {
    const Passage* const passage = passage_of(inputs);
    return passage == nullptr ? nullptr : passage->call(number);
  };
  parts.code = [names = native.attr("names").cast<std::vector<std::string>>(),
                encodings = native.attr("encodings").cast<models::Encodings>(), find](const auto& shell) {
    return models::make_decoder_code(names, shell.parameters, find, encodings);
  };
}

void make_embedding(models::NativeLayerParts& parts, const py::object& native) {
  parts.config = config_from<models::EmbeddingConfig>(native.attr("config"));
  parts.code = [weight = native.attr("weight").cast<size_t>(),
                frequencies = native.attr("frequencies").cast<size_t>()](const auto& shell) {
    return models::make_embedding_code({shell.parameters.at(weight), shell.buffers.at(frequencies)},
                                       [](const Values& inputs) {
                                         const Passage* const passage = passage_of(inputs);
                                         return passage == nullptr ? nullptr : passage->embedding();
                                       });
  };
}

void make_head(models::NativeLayerParts& parts, const py::object& native) {
  parts.config = config_from<models::HeadConfig>(native.attr("config"));
  parts.code = [norm = native.attr("norm").cast<size_t>(), weight = native.attr("weight").cast<size_t>(),
                bias = native.attr("bias").cast<std::optional<size_t>>()](const auto& shell) {
    models::HeadWeights weights{shell.parameters.at(norm), {shell.parameters.at(weight)}};
    if (bias) weights.head.bias = shell.parameters.at(*bias);
    return models::make_head_code(std::move(weights), [](const Values& inputs) {
      const Passage* const passage = passage_of(inputs);
      return passage == nullptr ? nullptr : passage->head();
    });
  };
}

}  // namespace

std::unique_ptr<runtime::Layer> make_model_layer(py::object object) {
  const py::object native = object.attr("native");
  if (native.is_none()) return make_python_layer(std::move(object));
  models::NativeLayerParts parts;
  const auto kind = native.attr("kind").cast<std::string>();
  (kind == "decoder" ? make_decoder : kind == "head" ? make_head : make_embedding)(parts, native);
  parts.general = make_python_layer(std::move(object));
  return models::make_native_layer(std::move(parts));
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
                  const std::array<std::optional<std::tuple<double, double, bool>>, models::kAdaptable.size()>& lora,
                  const std::string& arithmetic) {
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
                 config.arithmetic = parse_arithmetic(arithmetic);
                 for (size_t i = 0; i < lora.size(); ++i) {
                   if (lora[i])
                     std::tie(config.lora[i].scaling, config.lora[i].dropout, config.lora[i].training) = *lora[i];
                 }
                 return std::make_shared<DecoderConfig>(config);
               }),
           py::kw_only(), py::arg("head_dim"), py::arg("scaling"), py::arg("input_norm_eps"), py::arg("post_norm_eps"),
           py::arg("query_norm_eps"), py::arg("key_norm_eps"), py::arg("scales_norms_in_float"),
           py::arg("attention_dropout"), py::arg("training"), py::arg("activation"), py::arg("moe"), py::arg("lora"),
           py::arg("arithmetic"));
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
  py::class_<models::EmbeddingConfig, std::shared_ptr<models::EmbeddingConfig>>(module, "EmbeddingConfig")
      .def(
          py::init([](int64_t padding_index, double rotary_scaling, bool rotary_halves, const std::string& arithmetic) {
            return std::make_shared<models::EmbeddingConfig>(
                models::EmbeddingConfig{padding_index, rotary_scaling, rotary_halves, parse_arithmetic(arithmetic)});
          }),
          py::kw_only(), py::arg("padding_index"), py::arg("rotary_scaling"), py::arg("rotary_halves"),
          py::arg("arithmetic"));
  py::class_<EmbeddingCall>(module, "EmbeddingCall")
      .def(py::init([](int ids, std::optional<int> attention_mask, std::optional<int> positions, std::vector<int> kept,
                       const std::string& attention, size_t inputs) {
             EmbeddingCall call;
             call.ids = ids;
             call.attention_mask = attention_mask;
             call.positions = positions;
             call.kept = std::move(kept);
             call.attention = models::parse_attention(attention);
             call.inputs = inputs;
             return call;
           }),
           py::arg("ids"), py::arg("attention_mask"), py::arg("positions"), py::arg("kept"), py::arg("attention"),
           py::arg("inputs"));
  py::class_<models::HeadConfig, std::shared_ptr<models::HeadConfig>>(module, "HeadConfig")
      .def(py::init([](double norm_eps, bool scales_norm_in_float, const std::string& arithmetic) {
             return std::make_shared<models::HeadConfig>(
                 models::HeadConfig{norm_eps, scales_norm_in_float, parse_arithmetic(arithmetic)});
           }),
           py::kw_only(), py::arg("norm_eps"), py::arg("scales_norm_in_float"), py::arg("arithmetic"));
  py::class_<HeadCall>(module, "HeadCall")
      .def(py::init([](int hidden, std::optional<int> labels, std::optional<int> items, std::optional<double> share,
                       bool gives_logits, std::optional<int64_t> chunk_tokens, int64_t chunk_logit_bytes,
                       size_t inputs) {
             return HeadCall{hidden, labels, items, share, gives_logits, chunk_tokens, chunk_logit_bytes,
                             inputs, nullptr};
           }),
           py::arg("hidden"), py::arg("labels"), py::arg("items"), py::arg("share"), py::arg("gives_logits"),
           py::arg("chunk_tokens"), py::arg("chunk_logit_bytes"), py::arg("inputs"));
  module.attr("ADAPTABLE") = py::cast(std::vector<std::string>(models::kAdaptable.begin(), models::kAdaptable.end()));
  module.attr("RESULT") = DecoderCall::kResult;
  module.attr("ROUTER_LOGITS") = DecoderCall::kRouterLogits;
  py::class_<Passage, std::shared_ptr<Passage>>(module, "Passage")
      .def(py::init<std::vector<std::optional<DecoderCall>>, py::object, std::optional<EmbeddingCall>,
                    std::optional<HeadCall>>(),
           py::arg("calls"), py::arg("structure_after"), py::arg("embedding"), py::arg("head"))
      .def(
          "with_documents",
          [](const Passage& passage, std::shared_ptr<ops::Documents> whole,
             const std::vector<std::shared_ptr<ops::Documents>>& of_calls) {
            return passage.with_documents(std::move(whole), of_calls);
          },
          py::arg("whole"), py::arg("of_calls"));
  // What the native part before the layers hands on.
  module.attr("EMBEDDED") = std::vector<int>{EmbeddingCall::kHidden, EmbeddingCall::kCos, EmbeddingCall::kSin,
                                             EmbeddingCall::kMask, EmbeddingCall::kPositions};
  module.def(
      "embed",
      [](const models::EmbeddingConfig& config, EmbeddingCall call, const at::Tensor& weight,
         const at::Tensor& frequencies, std::vector<at::Tensor> inputs, std::shared_ptr<ops::Documents> documents) {
        call.documents = std::move(documents);
        const auto code =
            models::make_embedding_code({weight, frequencies}, [&](const Values& /*inputs*/) { return &call; });
        code->configure(std::make_shared<models::EmbeddingConfig>(config));
        return code->forward({std::move(inputs), nullptr}, {}).value().tensors;
      },
      py::arg("config"), py::arg("call"), py::arg("weight"), py::arg("frequencies"), py::arg("inputs"),
      py::arg("documents"), py::call_guard<py::gil_scoped_release>());
  module.def(
      "apply_head",
      [](const models::HeadConfig& config, const HeadCall& call, const at::Tensor& norm, const at::Tensor& weight,
         const std::optional<at::Tensor>& bias, std::vector<at::Tensor> inputs) {
        const auto code =
            models::make_head_code({norm, {weight, bias}}, [&](const Values& /*inputs*/) { return &call; });
        code->configure(std::make_shared<models::HeadConfig>(config));
        return code->forward({std::move(inputs), nullptr}, {}).value().tensors;
      },
      py::arg("config"), py::arg("call"), py::arg("norm"), py::arg("weight"), py::arg("bias"), py::arg("inputs"),
      py::call_guard<py::gil_scoped_release>());
  module.def(
      "exact_parts",
      [](const DecoderConfig& config, const std::vector<std::string>& names, const std::vector<at::Tensor>& weights,
         const models::Encodings& encodings) {
        return models::exact_parts(config, models::find_decoder_weights(names, weights, encodings));
      },
      py::arg("config"), py::arg("names"), py::arg("weights"), py::arg("encodings"));
  module.def(
      "decode",
      [](const DecoderConfig& config, const std::vector<std::string>& names, const std::vector<at::Tensor>& weights,
         const at::Tensor& hidden, const at::Tensor& cos, const at::Tensor& sin, const std::optional<at::Tensor>& mask,
         const std::string& attention, int64_t mlp_chunk_tokens, const std::optional<at::Tensor>& positions,
         const std::optional<std::string>& experts, const models::Encodings& encodings) {
        models::DecoderInputs inputs;
        inputs.hidden = hidden;
        inputs.cos = cos;
        inputs.sin = sin;
        inputs.mask = mask;
        inputs.attention = models::parse_attention(attention);
        inputs.positions = positions;
        if (experts) inputs.experts = models::parse_experts(*experts);
        inputs.mlp_chunk_tokens = mlp_chunk_tokens;
        models::DecoderWeights found = models::find_decoder_weights(names, weights, encodings);
        models::set_lora(found, config.lora);
        return models::decode(config, found, inputs);
      },
      py::arg("config"), py::arg("names"), py::arg("weights"), py::arg("hidden"), py::arg("cos"), py::arg("sin"),
      py::arg("mask"), py::arg("attention"), py::arg("mlp_chunk_tokens") = 0, py::arg("positions") = std::nullopt,
      py::arg("experts") = std::nullopt, py::arg("encodings") = models::Encodings(),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace roundpipe::python
