#include <roundpipe/models/native_layer.h>

#include <string>
#include <utility>
#include <vector>

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
  std::shared_ptr<const void> config;
};

class NativeShell final : public LayerShell {
 public:
  NativeShell(const NativeLayerParts& parts, std::unique_ptr<LayerShell> general)
      : general_(std::move(general)), code_(parts.code(*general_)) {
    parameters = general_->parameters;
    buffers = general_->buffers;
  }

  Values forward(const Values& inputs, const LayerContext& context) override {
    std::optional<Values> outputs;
    if (config_) outputs = code_->forward(inputs, context);
    return outputs ? std::move(*outputs) : general_->forward(inputs, context);
  }

  void refresh(const std::shared_ptr<const void>& attributes) override {
    const auto& now = *static_cast<const Attributes*>(attributes.get());
    if (now.general != general_attributes_ || !refreshed_) general_->refresh(now.general);
    general_attributes_ = now.general;
    config_ = now.config;
    if (config_) code_->configure(config_);
    refreshed_ = true;
  }

 private:
  const std::unique_ptr<LayerShell> general_;
  const std::unique_ptr<NativeCode> code_;
  std::shared_ptr<const void> general_attributes_;
  std::shared_ptr<const void> config_;
  bool refreshed_ = false;
};

class NativeLayer final : public Layer {
 public:
  explicit NativeLayer(NativeLayerParts parts) : parts_(std::move(parts)) {}

  std::string name() const override { return parts_.general->name(); }
  std::vector<memory::NamedTensor> parameters() const override { return parts_.general->parameters(); }
  std::vector<memory::NamedTensor> buffers() const override { return parts_.general->buffers(); }
  uint64_t mode_key() const override { return parts_.general->mode_key(); }
  std::string kind() const override { return parts_.general->kind(); }

  std::shared_ptr<const void> attributes() const override {
    const std::shared_ptr<const void> held = parts_.general->hold();  // one taking for both
    Attributes now{parts_.general->attributes(), parts_.config()};
    std::shared_ptr<const Attributes> before;  // dropped after the mutex, since that may wait for general's lock
    const MutexLock lock(mutex_);
    if (!attributes_ || attributes_->general != now.general || attributes_->config != now.config) {
      before = std::exchange(attributes_, std::make_shared<const Attributes>(std::move(now)));
    }
    return attributes_;
  }

  std::unique_ptr<LayerShell> make_shell(c10::Device device) override {
    return std::make_unique<NativeShell>(parts_, parts_.general->make_shell(device));
  }

 private:
  const NativeLayerParts parts_;
  mutable Mutex mutex_;
  mutable std::shared_ptr<const Attributes> attributes_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace

std::unique_ptr<Layer> make_native_layer(NativeLayerParts parts) {
  return std::make_unique<NativeLayer>(std::move(parts));
}

}  // namespace roundpipe::models
