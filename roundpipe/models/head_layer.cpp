#include <roundpipe/models/head_layer.h>

#include <utility>

#include <ATen/Functions.h>

#include <roundpipe/models/decoder.h>
#include <roundpipe/models/token_loss.h>

namespace roundpipe::models {

using at::Tensor;
using runtime::Values;

namespace {

class HeadCode final : public NativeCode {
 public:
  HeadCode(HeadWeights weights, FindHeadCall call) : weights_(std::move(weights)), call_(std::move(call)) {}

  void configure(const std::shared_ptr<const void>& config) override {
    config_ = std::static_pointer_cast<const HeadConfig>(config);
  }

  std::optional<Values> forward(const Values& inputs, const runtime::LayerContext& /*context*/) override {
    const HeadCall* const call = call_(inputs);
    if (call == nullptr || call->inputs != inputs.tensors.size()) return std::nullopt;
    const auto at = [&](int place) -> const Tensor& { return inputs.tensors[static_cast<size_t>(place)]; };
    const Tensor hidden = rms_norm(at(call->hidden), weights_.norm, config_->norm_eps, config_->scales_norm_in_float,
                                   config_->arithmetic);
    Values outputs;
    outputs.structure = std::shared_ptr<const void>(inputs.structure, call->structure);
    Tensor logits;
    if (call->labels) {
      const TokenLossOptions options{!call->items, call->chunk_tokens, call->chunk_logit_bytes, config_->arithmetic};
      Tensor loss =
          token_loss(hidden, weights_.head, at(*call->labels), options, call->gives_logits ? &logits : nullptr);
      if (call->items) loss = loss.div(at(*call->items).to(loss.device()));
      if (call->share) loss = loss.mul(*call->share);
      outputs.tensors.push_back(std::move(loss));
    } else {
      logits = at::linear(hidden, weights_.head.weight.values(), weights_.head.bias);
    }
    if (logits.defined()) outputs.tensors.push_back(std::move(logits));
    return outputs;
  }

 private:
  const HeadWeights weights_;
  const FindHeadCall call_;
  std::shared_ptr<const HeadConfig> config_;
};

}  // namespace

std::unique_ptr<NativeCode> make_head_code(HeadWeights weights, FindHeadCall call) {
  return std::make_unique<HeadCode>(std::move(weights), std::move(call));
}

}  // namespace roundpipe::models
