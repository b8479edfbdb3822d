#include <roundpipe/api/layer.h>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/util/Type.h>

#include <roundpipe/api/engine_layer.h>
#include <roundpipe/api/module_instance.h>
#include <roundpipe/core/error.h>
#include <roundpipe/core/moved_from.h>
#include <roundpipe/runtime/model/layer.h>

namespace roundpipe {

namespace {

std::shared_ptr<LayerInstance> function_instance(
    NamedParameters parameters,
    std::function<runtime::Values(const std::vector<at::Tensor>&, const runtime::Values&)> function) {
  auto instance = std::make_shared<LayerInstance>();
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : parameters) {
    if (!tensor.defined())
      throw std::invalid_argument(concat("[layer] parameter '", name, "' is undefined, expected a tensor"));
    tensors.push_back(tensor);
  }
  instance->parameters = parameters;
  instance->run = [function, tensors](const runtime::Values& values) { return function(tensors, values); };
  instance->copy = [function, parameters] {
    NamedParameters empty;
    for (const auto& [name, tensor] : parameters)
      empty.emplace_back(name, at::empty({0}, tensor.options().requires_grad(false)));
    return function_instance(std::move(empty), function);
  };
  return instance;
}

}  // namespace

Layer::Layer(std::shared_ptr<torch::nn::Module> module, ModuleRuns runs, ModuleCopies copies)
    : original_(module_instance(std::move(module), runs, std::move(copies))), runs_(std::move(runs)) {}

Layer::Layer(const torch::nn::AnyModule& module)
    : original_(any_instance(module)), runs_([type = module.ptr()](const std::shared_ptr<torch::nn::Module>&) {
        throw std::invalid_argument(concat("[layer] a factory was given for a ", type->name(),
                                           " that is a child of a torch::nn::Sequential, expected a layer that was "
                                           "made by roundpipe::layer(module)"));
        return std::function<runtime::Values(const runtime::Values&)>();
      }) {}

Layer::Layer(NamedParameters parameters,
             std::function<runtime::Values(const std::vector<at::Tensor>&, const runtime::Values&)> function)
    : original_(function_instance(std::move(parameters), std::move(function))) {}

Layer& Layer::operator=(Layer&& other) noexcept { return move_into(*this, std::move(other)); }

const std::shared_ptr<LayerInstance>& Layer::original() const {
  require_not_moved_from(original_ != nullptr, "layer");
  return original_;
}

Layer& Layer::named(std::string name) {
  original();
  name_ = std::move(name);
  return *this;
}

Layer& Layer::made_by(std::function<std::shared_ptr<torch::nn::Module>()> factory) {
  if (!original()->module) throw std::invalid_argument("[layer] a function needs no factory, and was given one");
  auto changed = std::make_shared<LayerInstance>(*original_);
  const ModuleCopies copies = [factory = std::move(factory)](const torch::nn::Module&) { return factory(); };
  changed->copy = module_instance(original_->module, runs_, copies)->copy;
  original_ = std::move(changed);
  return *this;
}

Layer& Layer::tie(const std::string& name, const at::Tensor& parameter) {
  auto changed = std::make_shared<LayerInstance>(*original());
  for (auto& [own_name, own] : changed->parameters) {
    if (own_name != name) continue;
    if (!parameter.defined() || own.sizes() != parameter.sizes() || own.scalar_type() != parameter.scalar_type()) {
      throw std::invalid_argument(concat("[layer] parameter '", name, "' is ", own.scalar_type(), " of ", own.sizes(),
                                         ", and is to be tied to another tensor, expected one of the same shape and "
                                         "dtype"));
    }
    own = parameter;
    original_ = std::move(changed);
    return *this;
  }
  std::string known;
  for (const auto& [own_name, own] : original_->parameters) known += concat(known.empty() ? "" : ", ", own_name);
  throw std::invalid_argument(
      concat("[layer] there is no parameter '", name, "' to tie, expected one of: ", known.empty() ? "none" : known));
}

std::string Layer::name_or(size_t number) const { return name_.empty() ? std::to_string(number) : name_; }

std::unique_ptr<runtime::Layer> Layer::for_engine(size_t number) const {
  require_unchanged(number);
  for (const auto& [name, parameter] : parameters()) {
    if (parameter.is_leaf()) continue;
    throw std::invalid_argument(
        concat("[layer] parameter '", name, "' of layer ", name_or(number),
               " was computed from other tensors, which would get no gradient, expected a leaf of autograd; pass those "
               "tensors and compute it inside the layer, or pass parameter.detach().requires_grad_()"));
  }
  return make_engine_layer(name_or(number), original());
}

void Layer::require_unchanged(size_t number) const { roundpipe::require_unchanged(*original(), name_or(number)); }

}  // namespace roundpipe
