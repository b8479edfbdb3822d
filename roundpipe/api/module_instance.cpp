#include <roundpipe/api/module_instance.h>

#include <algorithm>

#include <c10/util/Type.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <roundpipe/core/error.h>

namespace roundpipe {

namespace {

// The tensor that the module's forward reads where it registered `tensor` as its parameter `name`.
at::Tensor parameter_in_use(torch::nn::Module& module, const std::string& name, const at::Tensor& tensor) {
  const bool is_weight = name == "weight";
  if (const auto* linear = dynamic_cast<torch::nn::LinearImpl*>(&module); linear && (is_weight || name == "bias"))
    return is_weight ? linear->weight : linear->bias;
  if (const auto* embedding = dynamic_cast<torch::nn::EmbeddingImpl*>(&module); embedding && is_weight)
    return embedding->weight;
  return tensor;
}

void add_distinct(NamedParameters& tensors, const std::string& prefix, const std::string& name,
                  const at::Tensor& tensor) {
  const auto same = [&](const auto& known) { return known.second.is_same(tensor); };
  if (!tensor.defined() || std::ranges::any_of(tensors, same)) return;
  tensors.emplace_back(prefix.empty() ? name : prefix + "." + name, tensor);
}

// The parameters and buffers, and itself with its submodules, that the module has now.
void collect_tensors(LayerInstance& instance) {
  for (const auto& entry : instance.module->named_modules()) {
    torch::nn::Module& module = *entry.value();
    for (const auto& parameter : module.named_parameters(/*recurse=*/false)) {
      add_distinct(instance.parameters, entry.key(), parameter.key(),
                   parameter_in_use(module, parameter.key(), parameter.value()));
    }
    for (const auto& buffer : module.named_buffers(/*recurse=*/false)) {
      add_distinct(instance.buffers, entry.key(), buffer.key(), buffer.value());
    }
  }
  instance.found = instance.parameters;
  instance.found.insert(instance.found.end(), instance.buffers.begin(), instance.buffers.end());
  instance.submodules = instance.module->modules();
}

[[noreturn]] void refuse_copy(const torch::nn::Module& module, const std::string& why) {
  throw std::invalid_argument(
      concat("[layer] each device needs a copy of a ", module.name(), ", and it cannot be copied: ", why,
             "; derive it from torch::nn::Cloneable and register everything in reset(), or give "
             "roundpipe::layer(module).made_by(...) a function that makes another one"));
}

template <typename Copy>
auto copied(const torch::nn::Module& module, Copy copy) {
  try {
    return copy();
  } catch (const c10::Error& error) {
    refuse_copy(module, error.what_without_backtrace());
  }
}

template <typename T>
bool split_if(torch::nn::AnyValue& value, runtime::Values& values) {
  T* const found = value.try_get<T>();
  if (found != nullptr) values = split(std::move(*found));
  return found != nullptr;
}

runtime::Values split_any(torch::nn::AnyValue value, const torch::nn::Module& module) {
  using at::Tensor;
  runtime::Values values;
  const bool known = split_if<Tensor>(value, values) || split_if<std::vector<Tensor>>(value, values) ||
                     split_if<std::tuple<Tensor, Tensor>>(value, values) ||
                     split_if<std::tuple<Tensor, Tensor, Tensor>>(value, values) ||
                     split_if<std::tuple<Tensor, Tensor, Tensor, Tensor>>(value, values) ||
                     split_if<std::tuple<Tensor, std::tuple<Tensor, Tensor>>>(value, values) ||
                     split_if<std::pair<Tensor, Tensor>>(value, values) ||
                     split_if<torch::OrderedDict<std::string, Tensor>>(value, values);
  if (known) return values;
  throw std::invalid_argument(concat("[layer] a ", module.name(), " in a torch::nn::Sequential returned a ",
                                     c10::demangle(value.type_info().name()),
                                     ", expected tensors, or a row, tuple or dictionary of them; make the model of a "
                                     "vector of roundpipe::layer(module), which knows every type"));
}

runtime::Values call_any(torch::nn::AnyModule& module, const runtime::Values& values) {
  std::vector<torch::nn::AnyValue> a = Structure::of(values).arguments(values.tensors);
  const auto result = [&] {
    switch (a.size()) {
      case 1:
        return module.any_forward(std::move(a[0]));
      case 2:
        return module.any_forward(std::move(a[0]), std::move(a[1]));
      case 3:
        return module.any_forward(std::move(a[0]), std::move(a[1]), std::move(a[2]));
      case 4:
        return module.any_forward(std::move(a[0]), std::move(a[1]), std::move(a[2]), std::move(a[3]));
      default:
        throw std::invalid_argument(concat("[layer] a ", module.ptr()->name(), " in a torch::nn::Sequential was given ",
                                           a.size(),
                                           " arguments, expected one to four; pass more as one tuple, to a "
                                           "vector of roundpipe::layer(module)"));
    }
  };
  return split_any(result(), *module.ptr());
}

}  // namespace

std::shared_ptr<LayerInstance> module_instance(std::shared_ptr<torch::nn::Module> module, const ModuleRuns& runs,
                                               ModuleCopies copies) {
  if (!module) throw std::invalid_argument("[layer] there is no module: the pointer is null, expected a module");
  auto instance = std::make_shared<LayerInstance>();
  instance->module = module;
  instance->run = runs(module);
  instance->copy = [module, runs, copies] {
    std::shared_ptr<torch::nn::Module> made = copied(*module, [&] { return copies(*module); });
    if (!made || typeid(*made) != typeid(*module)) {
      refuse_copy(*module, made ? concat("the copy is a ", made->name()) : std::string("there was no copy"));
    }
    return module_instance(std::move(made), runs, copies);
  };
  collect_tensors(*instance);
  return instance;
}

std::shared_ptr<LayerInstance> any_instance(const torch::nn::AnyModule& module) {
  auto instance = std::make_shared<LayerInstance>();
  instance->module = module.ptr();
  instance->run = [own = module](const runtime::Values& values) mutable { return call_any(own, values); };
  instance->copy = [own = module] { return any_instance(copied(*own.ptr(), [&] { return own.clone(); })); };
  collect_tensors(*instance);
  return instance;
}

void require_unchanged(const LayerInstance& instance, const std::string& name) {
  if (!instance.module) return;
  LayerInstance now;
  now.module = instance.module;
  collect_tensors(now);
  const auto same = [](const auto& a, const auto& b) { return a.first == b.first && a.second.is_same(b.second); };
  const auto [before, after] = std::ranges::mismatch(instance.found, now.found, same);
  const bool odd = before != instance.found.end() || after != now.found.end();
  if (!odd && instance.submodules == now.submodules) return;
  const std::string where =
      !odd ? "submodules" : concat("'", before != instance.found.end() ? before->first : after->first, "'");
  throw std::invalid_argument(concat("[layer] parameters, buffers or submodules of layer ", name, " (", where, " of a ",
                                     instance.module->name(),
                                     ") were added, removed or replaced since the model was made; change values in "
                                     "place, or make the model again"));
}

}  // namespace roundpipe
