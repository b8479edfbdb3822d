#include <roundpipe/models/embedding_layer.h>

#include <utility>

#include <ATen/Functions.h>

#include <roundpipe/models/masks.h>
#include <roundpipe/models/rotary_tables.h>

namespace roundpipe::models {

using at::Tensor;
using runtime::Values;

namespace {

class EmbeddingCode final : public NativeCode {
 public:
  EmbeddingCode(EmbeddingTensors tensors, FindEmbeddingCall call)
      : tensors_(std::move(tensors)), call_(std::move(call)) {}

  void configure(const std::shared_ptr<const void>& config) override {
    config_ = std::static_pointer_cast<const EmbeddingConfig>(config);
  }

  std::optional<Values> forward(const Values& inputs, const runtime::LayerContext& /*context*/) override {
    const EmbeddingCall* const call = call_(inputs);
    if (call == nullptr || call->inputs != inputs.tensors.size()) return std::nullopt;
    const auto at = [&](int place) -> const Tensor& { return inputs.tensors[static_cast<size_t>(place)]; };
    const Tensor& ids = at(call->ids);
    Tensor hidden = at::embedding(tensors_.weight, ids, config_->padding_index);
    TokenPlaces places{ids.size(0), ids.size(1), {}, {}, call->documents};
    if (call->attention_mask) places.attention_mask = at(*call->attention_mask);
    if (call->positions) places.positions = at(*call->positions);
    const bool is_fast = config_->arithmetic == Arithmetic::kFast;
    std::optional<Tensor> mask =
        make_mask(call->attention, places, ids.device(),
                  {.padding_may_attend = is_fast && call->documents->padding_is_unread, .gives_starts = is_fast});
    const Tensor positions =
        call->positions ? places.positions : at::arange(ids.size(1), ids.options().dtype(at::kLong)).unsqueeze(0);
    auto [cos, sin] = rotary_tables(positions, tensors_.frequencies, config_->rotary_scaling, hidden.scalar_type(),
                                    config_->rotary_halves);
    Values outputs;
    outputs.structure = std::shared_ptr<const void>(inputs.structure, call->structure);
    outputs.tensors = {std::move(hidden), std::move(cos), std::move(sin),
                       mask ? std::move(*mask) : at::empty({0}, ids.options().dtype(at::kBool)), positions};
    for (const int place : call->kept) outputs.tensors.push_back(at(place));
    return outputs;
  }

 private:
  const EmbeddingTensors tensors_;
  const FindEmbeddingCall call_;
  std::shared_ptr<const EmbeddingConfig> config_;
};

}  // namespace

std::unique_ptr<NativeCode> make_embedding_code(EmbeddingTensors tensors, FindEmbeddingCall call) {
  return std::make_unique<EmbeddingCode>(std::move(tensors), std::move(call));
}

}  // namespace roundpipe::models
