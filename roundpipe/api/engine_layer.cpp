#include <roundpipe/api/engine_layer.h>

#include <algorithm>
#include <atomic>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>

#include <roundpipe/core/error.h>
#include <roundpipe/core/mutex.h>
#include <roundpipe/runtime/engine.h>
#include <roundpipe/torch_compat/own_generators.h>

namespace roundpipe {

using memory::NamedTensor;
using runtime::LayerContext;
using runtime::Values;

namespace {

using Flags = std::vector<char>;  // whether each module trains, from the root down

void empty_out(NamedParameters& tensors, c10::Device device) {
  const at::NoGradGuard no_grad;
  for (auto& [name, tensor] : tensors) {
    tensor.set_requires_grad(false);
    tensor.set_data(at::empty({0}, tensor.options().device(device)));
  }
}

void empty_out(LayerInstance& instance, c10::Device device) {
  for (NamedParameters* const tensors : {&instance.parameters, &instance.buffers}) empty_out(*tensors, device);
}

// Initialising an instance draws random numbers, which are thrown away.
std::shared_ptr<LayerInstance> copy_of(const LayerInstance& instance) {
  const torch_compat::OwnGenerators::Scope own(std::make_shared<torch_compat::OwnGenerators>());
  const at::NoGradGuard no_grad;
  return instance.copy();
}

// The same without weights.
std::shared_ptr<LayerInstance> empty_copy_of(const LayerInstance& instance) {
  std::shared_ptr<LayerInstance> made = copy_of(instance);
  empty_out(*made, c10::kCPU);
  return made;
}

std::vector<std::string> names_of(const NamedParameters& tensors) {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : tensors) names.push_back(name);
  return names;
}

// The first name that only one of the two has, for a message; empty if there is none.
std::string odd_one(const NamedParameters& a, const NamedParameters& b) {
  const std::vector<std::string> names_a = names_of(a), names_b = names_of(b);
  for (size_t i = 0; i < std::max(names_a.size(), names_b.size()); ++i) {
    if (i >= names_a.size()) return names_b[i];
    if (i >= names_b.size() || names_a[i] != names_b[i]) return names_a[i];
  }
  return "";
}

void require_alike(const std::string& name, const LayerInstance& original, const LayerInstance& made) {
  std::string odd = odd_one(original.parameters, made.parameters);
  if (odd.empty()) odd = odd_one(original.buffers, made.buffers);
  if (!odd.empty()) {
    throw std::invalid_argument(
        concat("[layer] layer ", name, " and a copy of it differ in '", odd,
               "', expected the same parameters and buffers; if the layer uses one tensor under two names, copies by "
               "torch::nn::Module::clone have two: give Layer::made_by a function that makes the module with the tie"));
  }
  for (const auto& [own_name, own] : made.parameters) {
    for (const auto& [user_name, user] : original.parameters) {
      if (!own.is_same(user)) continue;
      throw std::invalid_argument(
          concat("[layer] layer ", name, " shares the tensor '", user_name,
                 "' with a copy of it, expected copies with tensors of their own; register a new tensor of that shape, "
                 "and tie it to the other layer's with Layer::tie"));
    }
  }
}

// The modules of an instance, parents before children.
std::vector<std::shared_ptr<torch::nn::Module>> modules_of(const LayerInstance& instance) {
  return instance.module ? instance.module->modules() : std::vector<std::shared_ptr<torch::nn::Module>>();
}

thread_local bool values_are_read = true;

class Shell final : public runtime::LayerShell {
 public:
  Shell(std::shared_ptr<LayerInstance> instance, std::shared_ptr<std::atomic<int>> alive)
      : instance_(std::move(instance)), alive_(std::move(alive)), modules_(modules_of(*instance_)) {
    for (const auto& [name, tensor] : instance_->parameters) parameters.push_back(tensor);
    for (const auto& [name, tensor] : instance_->buffers) buffers.push_back(tensor);
    ++*alive_;
  }
  ~Shell() override { --*alive_; }

  Values forward(const Values& inputs, const LayerContext& context) override {
    struct Scope {
      explicit Scope(bool are_read) { values_are_read = are_read; }
      ~Scope() { values_are_read = true; }
    } const scope(context.outputs_are_read);
    return instance_->run(inputs);
  }

  void refresh(const std::shared_ptr<const void>& attributes) override {
    const Flags& flags = *static_cast<const Flags*>(attributes.get());
    // train() reaches the children as well, so parents go first.
    for (size_t i = 0; i < modules_.size(); ++i) modules_[i]->train(flags[i] != 0);
  }

 private:
  const std::shared_ptr<LayerInstance> instance_;
  const std::shared_ptr<std::atomic<int>> alive_;
  const std::vector<std::shared_ptr<torch::nn::Module>> modules_;
};

class EngineLayer final : public runtime::Layer {
 public:
  EngineLayer(std::string name, std::shared_ptr<LayerInstance> original)
      : name_(std::move(name)), original_(std::move(original)), modules_(modules_of(*original_)) {
    pattern_ = copy_of(*original_);
    require_alike(name_, *original_, *pattern_);
    empty_out(*pattern_, c10::kCPU);
  }

  std::string name() const override { return name_; }
  std::vector<NamedTensor> parameters() const override { return named(original_->parameters); }
  std::vector<NamedTensor> buffers() const override { return named(original_->buffers); }

  uint64_t mode_key() const override {
    uint64_t key = 1;
    for (const auto& module : modules_) key = key * 1'000'003 + (module->is_training() ? 2 : 1);
    return key;
  }

  std::shared_ptr<const void> attributes() const override {
    Flags now;
    for (const auto& module : modules_) now.push_back(module->is_training());
    if (!flags_ || *flags_ != now) flags_ = std::make_shared<const Flags>(std::move(now));
    stock_up();
    return flags_;
  }

  std::unique_ptr<runtime::LayerShell> make_shell(c10::Device device) override {
    std::shared_ptr<LayerInstance> instance;
    {
      const MutexLock lock(mutex_);
      if (!stock_.empty()) {
        instance = std::move(stock_.back());
        stock_.pop_back();
      } else {
        instance = empty_copy_of(*pattern_);
      }
    }
    empty_out(*instance, device);
    return std::make_unique<Shell>(std::move(instance), alive_);
  }

 private:
  static std::vector<NamedTensor> named(const NamedParameters& tensors) {
    std::vector<NamedTensor> named;
    for (const auto& [name, tensor] : tensors) named.push_back({name, tensor});
    return named;
  }

  // Makes the copies that the pool may ask for on the caller's thread: initialising one runs the user's code and takes
  // memory, which would count against a device.
  void stock_up() const {
    const int wanted = runtime::Engine::current()->pool_size() - alive_->load();
    const MutexLock lock(mutex_);
    while (static_cast<int>(stock_.size()) < wanted) stock_.push_back(empty_copy_of(*pattern_));
  }

  const std::string name_;
  const std::shared_ptr<LayerInstance> original_;
  const std::vector<std::shared_ptr<torch::nn::Module>> modules_;
  std::shared_ptr<LayerInstance> pattern_;
  const std::shared_ptr<std::atomic<int>> alive_ = std::make_shared<std::atomic<int>>(0);  // shells
  mutable std::shared_ptr<const Flags> flags_;  // the latest result of attributes(); caller's thread only
  mutable Mutex mutex_;
  mutable std::vector<std::shared_ptr<LayerInstance>> stock_ ROUNDPIPE_GUARDED_BY(mutex_);
};

}  // namespace

bool outputs_are_read() { return values_are_read; }

std::unique_ptr<runtime::Layer> make_engine_layer(std::string name, std::shared_ptr<LayerInstance> original) {
  return std::make_unique<EngineLayer>(std::move(name), std::move(original));
}

}  // namespace roundpipe
