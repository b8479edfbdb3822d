#include <roundpipe/models/decoder_layer.h>

#include <algorithm>
#include <utility>

namespace roundpipe::models {

using runtime::Values;

namespace {

class DecoderCode final : public NativeCode {
 public:
  DecoderCode(const std::vector<std::string>& names, const std::vector<at::Tensor>& parameters, FindDecoderCall call,
              const Encodings& encodings)
      : call_(std::move(call)), weights_(find_decoder_weights(names, parameters, encodings)) {}

  void configure(const std::shared_ptr<const void>& config) override {
    config_ = std::static_pointer_cast<const DecoderConfig>(config);
    set_lora(weights_, config_->lora);
  }

  std::optional<Values> forward(const Values& inputs, const runtime::LayerContext& context) override {
    const DecoderCall* const call = call_(inputs);
    if (call == nullptr || call->inputs != inputs.tensors.size()) return std::nullopt;
    DecoderInputs given;
    const auto at = [&](int place) -> const at::Tensor& { return inputs.tensors[static_cast<size_t>(place)]; };
    given.hidden = at(call->hidden);
    given.cos = at(call->cos);
    given.sin = at(call->sin);
    if (call->mask && at(*call->mask).numel() > 0) given.mask = at(*call->mask);
    if (call->positions) given.positions = at(*call->positions);
    given.documents = call->documents;
    given.attention = call->attention;
    given.experts = call->experts;
    given.mlp_chunk_tokens = call->mlp_chunk_tokens;
    given.result_is_read = context.outputs_are_read;
    at::Tensor logits;
    const bool keeps_logits = std::ranges::find(call->outputs, DecoderCall::kRouterLogits) != call->outputs.end();
    const at::Tensor result = decode(*config_, weights_, given, keeps_logits ? &logits : nullptr);
    Values outputs;
    outputs.tensors.reserve(call->outputs.size());
    for (const int place : call->outputs) {
      outputs.tensors.push_back(place == DecoderCall::kResult         ? result
                                : place == DecoderCall::kRouterLogits ? logits
                                                                      : at(place));
    }
    outputs.structure = std::shared_ptr<const void>(inputs.structure, call->structure);
    return outputs;
  }

 private:
  const FindDecoderCall call_;
  DecoderWeights weights_;  // with the adapters' numbers of config_
  std::shared_ptr<const DecoderConfig> config_;
};

}  // namespace

std::unique_ptr<NativeCode> make_decoder_code(const std::vector<std::string>& names,
                                              const std::vector<at::Tensor>& parameters, FindDecoderCall call,
                                              const Encodings& encodings) {
  return std::make_unique<DecoderCode>(names, parameters, std::move(call), encodings);
}

}  // namespace roundpipe::models
