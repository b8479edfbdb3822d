#include <roundpipe/models/decoder_layer.h>

#include <algorithm>
#include <utility>

#include <roundpipe/core/mutex.h>

namespace roundpipe::models {

using runtime::Layer;
using runtime::LayerContext;
using runtime::LayerShell;
using runtime::Values;

namespace {

// What Layer::attributes() returns here.
struct Attributes {
  std::shared_ptr<const void> general;
  std::shared_ptr<const DecoderConfig> config;
};

class DecoderShell final : public LayerShell {
 public:
  DecoderShell(std::shared_ptr<const DecoderLayerParts> parts, std::unique_ptr<LayerShell> general)
      : parts_(std::move(parts)),
        general_(std::move(general)),
        weights_(find_decoder_weights(parts_->names, general_->parameters)) {
    parameters = general_->parameters;
  }

  Values forward(const Values& inputs, const LayerContext& context) override {
    const DecoderCall* const call = config_ ? parts_->call(inputs) : nullptr;
    if (call == nullptr || call->inputs != inputs.tensors.size()) return general_->forward(inputs, context);
    DecoderInputs given;
    const auto at = [&](int place) -> const at::Tensor& { return inputs.tensors[static_cast<size_t>(place)]; };
    given.hidden = at(call->hidden);
    given.cos = at(call->cos);
    given.sin = at(call->sin);
    if (call->mask) given.mask = at(*call->mask);
    if (call->positions) given.positions = at(*call->positions);
    given.attention = call->attention;
    given.experts = call->experts;
    given.mlp_chunk_tokens = call->mlp_chunk_tokens;
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

  void refresh(const std::shared_ptr<const void>& attributes) override {
    const auto& now = *static_cast<const Attributes*>(attributes.get());
    if (now.general != general_attributes_ || !refreshed_) general_->refresh(now.general);
    general_attributes_ = now.general;
    config_ = now.config;
    if (config_) set_lora(weights_, config_->lora);
    refreshed_ = true;
  }

 private:
  const std::shared_ptr<const DecoderLayerParts> parts_;
  const std::unique_ptr<LayerShell> general_;
  DecoderWeights weights_;  // with the adapters' numbers of config_
  std::shared_ptr<const void> general_attributes_;
  std::shared_ptr<const DecoderConfig> config_;
  bool refreshed_ = false;
};

class DecoderLayer final : public Layer {
 public:
  explicit DecoderLayer(DecoderLayerParts parts)
      : parts_(std::make_shared<const DecoderLayerParts>(std::move(parts))) {}

  std::string name() const override { return parts_->general->name(); }
  std::vector<memory::NamedTensor> parameters() const override { return parts_->general->parameters(); }
  std::vector<memory::NamedTensor> buffers() const override { return {}; }
  uint64_t mode_key() const override { return parts_->general->mode_key(); }

  std::shared_ptr<const void> attributes() const override {
    const std::shared_ptr<const void> held = parts_->general->hold();  // one taking for both
    Attributes now{parts_->general->attributes(), parts_->config()};
    std::shared_ptr<const Attributes> before;  // dropped after the mutex, since that may wait for general's lock
    const MutexLock lock(mutex_);
    if (!attributes_ || attributes_->general != now.general || attributes_->config != now.config) {
      before = std::exchange(attributes_, std::make_shared<const Attributes>(std::move(now)));
    }
    return attributes_;
  }

  std::unique_ptr<LayerShell> make_shell(c10::Device device) override {
    return std::make_unique<DecoderShell>(parts_, parts_->general->make_shell(device));
  }

 private:
  const std::shared_ptr<const DecoderLayerParts> parts_;
  mutable Mutex mutex_;
  mutable std::shared_ptr<const Attributes> attributes_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Layer> make_decoder_layer(DecoderLayerParts parts) {
  return std::make_unique<DecoderLayer>(std::move(parts));
}

}  // namespace roundpipe::models
