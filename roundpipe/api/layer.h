#pragma once

#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include <roundpipe/api/layer_instance.h>

namespace roundpipe::runtime {
class Layer;
}

namespace roundpipe {

namespace detail {

// The type of the arguments of a function, decayed, and of its result.
template <typename Result, typename... Arguments>
struct SignatureOf {
  using Return = std::decay_t<Result>;
  using Values = std::tuple<std::decay_t<Arguments>...>;
};
template <typename F>
struct Signature : Signature<decltype(&F::operator())> {};
template <typename R, typename... A>
struct Signature<R(A...)> : SignatureOf<R, A...> {};
template <typename R, typename... A>
struct Signature<R(A...) const> : SignatureOf<R, A...> {};
template <typename R, typename... A>
struct Signature<R(A...) &> : SignatureOf<R, A...> {};
template <typename R, typename... A>
struct Signature<R(A...) const&> : SignatureOf<R, A...> {};
template <typename R, typename... A>
struct Signature<R(A...) noexcept> : SignatureOf<R, A...> {};
template <typename R, typename... A>
struct Signature<R(A...) const noexcept> : SignatureOf<R, A...> {};
template <typename R, typename... A>
struct Signature<R(A...) & noexcept> : SignatureOf<R, A...> {};
template <typename R, typename... A>
struct Signature<R(A...) const & noexcept> : SignatureOf<R, A...> {};
template <typename F>
  requires std::is_function_v<F>
struct Signature<F*> : Signature<F> {};
template <typename C, typename F>
  requires std::is_function_v<F>
struct Signature<F C::*> : Signature<F> {};

// The arguments without the first one.
template <typename Tuple>
struct Rest;
template <typename First, typename... Others>
struct Rest<std::tuple<First, Others...>> {
  using Values = std::tuple<Others...>;
};

// Calls `function` with the arguments that `values` holds: the value itself if it takes one, the elements of a tuple if
// it takes several.
template <typename Arguments, typename Function>
runtime::Values call_with(const Function& function, const runtime::Values& values) {
  if constexpr (std::tuple_size_v<Arguments> == 1) {
    using Only = std::tuple_element_t<0, Arguments>;
    return split(function(join<Only>(values)));
  } else {
    return split(std::apply(function, join<Arguments>(values)));
  }
}

}  // namespace detail

// One layer of a model: the unit that moves to a device. Made by the functions below. Of a layer that was moved from,
// what reads or changes it throws std::invalid_argument.
// Ownership: shares the user's module. Thread safety: the caller's thread.
class Layer {
 public:
  // Of a module that runs as `runs` says, which is given an instance. `copies` makes another instance.
  Layer(std::shared_ptr<torch::nn::Module> module, ModuleRuns runs, ModuleCopies copies);
  // A child of a torch::nn::Sequential. It may take and return tensors, and rows and tuples of tensors.
  explicit Layer(const torch::nn::AnyModule& module);
  // Of parameters and a function over them.
  Layer(NamedParameters parameters,
        std::function<runtime::Values(const std::vector<at::Tensor>&, const runtime::Values&)> function);

  Layer(const Layer&) = default;
  Layer& operator=(const Layer&) = default;
  Layer(Layer&&) = default;
  Layer& operator=(Layer&& other) noexcept;

  // The name in messages and in the parameters' names. By default, the layer's number.
  Layer& named(std::string name);
  // For a module without torch::nn::Module::clone: `factory` makes another one of the same structure, whose values do
  // not matter. It runs on the thread that makes a call, and rarely on a device's.
  Layer& made_by(std::function<std::shared_ptr<torch::nn::Module>()> factory);
  // The layer's parameter `name` is `parameter`, another layer's: both layers use one tensor, and their gradients are
  // added. The module's own tensor of that name is not used. Throws std::invalid_argument if the layer has no such
  // parameter, or one of another shape or dtype.
  Layer& tie(const std::string& name, const at::Tensor& parameter);

  const std::string& name() const { return name_; }
  // Its name or, without one, its number.
  std::string name_or(size_t number) const;
  // The layer in the engine's form. `number`: its default name. Throws std::invalid_argument for a module that cannot
  // be copied; the message says what to do.
  std::unique_ptr<runtime::Layer> for_engine(size_t number) const;
  // Throws std::invalid_argument if the module has other parameters, buffers or submodules than when the layer was
  // made. `number`: as above.
  void require_unchanged(size_t number) const;
  // The user's tensors, ties in place.
  const NamedParameters& parameters() const { return original()->parameters; }
  const NamedParameters& buffers() const { return original()->buffers; }

 private:
  const std::shared_ptr<LayerInstance>& original() const;

  std::string name_;
  std::shared_ptr<LayerInstance> original_;  // null: moved from
  ModuleRuns runs_;                          // of modules
};

// A layer that calls `module->forward(arguments...)`, for any torch::nn::Module whose forward is one function. A
// forward of one argument takes the value that the layer before returned (in the first layer: the model's input); a
// forward of several takes the elements of a tuple, or several tensors. Values: see TensorsOf.
//
// Each device gets a copy of the module, by Module::clone, so a class of your own derives from torch::nn::Cloneable, or
// Layer::made_by is given a factory. Copies share what else the module holds (plain members are copied once, when the
// model is made). Training flags and requires_grad are followed from call to call. Buffers are written in place.
template <typename M>
  requires std::is_base_of_v<torch::nn::Module, M>
Layer layer(std::shared_ptr<M> module) {
  using Arguments = typename detail::Signature<decltype(&M::forward)>::Values;
  return Layer(
      std::move(module),
      [](std::shared_ptr<torch::nn::Module> made) {
        return [instance = std::dynamic_pointer_cast<M>(made)](const runtime::Values& values) {
          const auto forward = [&](auto&&... arguments) {
            return instance->forward(std::forward<decltype(arguments)>(arguments)...);
          };
          return detail::call_with<Arguments>(forward, values);
        };
      },
      [](const torch::nn::Module& from) { return from.clone(); });
}
template <typename Impl>
Layer layer(const torch::nn::ModuleHolder<Impl>& holder) {
  return layer(holder.ptr());
}

// The same with a function `forward(M& module, arguments...)` in place of the module's own forward: for one that is
// overloaded, has default arguments or is a template.
template <typename M, typename Forward>
  requires std::is_base_of_v<torch::nn::Module, M>
Layer layer(std::shared_ptr<M> module, Forward forward) {
  using Arguments = typename detail::Rest<typename detail::Signature<Forward>::Values>::Values;
  return Layer(
      std::move(module),
      [forward](std::shared_ptr<torch::nn::Module> made) {
        return [forward, instance = std::dynamic_pointer_cast<M>(made)](const runtime::Values& values) {
          const auto call = [&](auto&&... arguments) {
            return forward(*instance, std::forward<decltype(arguments)>(arguments)...);
          };
          return detail::call_with<Arguments>(call, values);
        };
      },
      [](const torch::nn::Module& from) { return from.clone(); });
}
template <typename Impl, typename Forward>
Layer layer(const torch::nn::ModuleHolder<Impl>& holder, Forward forward) {
  return layer(holder.ptr(), std::move(forward));
}

// A layer without a module: `function(parameters, arguments...)`, where `parameters` are the given tensors, in order,
// on the device. It is called on the devices' threads, so what it captures must not change.
template <typename Function>
Layer layer(NamedParameters parameters, Function function) {
  using Arguments = typename detail::Rest<typename detail::Signature<Function>::Values>::Values;
  return Layer(std::move(parameters), [function](const std::vector<at::Tensor>& own, const runtime::Values& values) {
    const auto call = [&](auto&&... arguments) {
      return function(own, std::forward<decltype(arguments)>(arguments)...);
    };
    return detail::call_with<Arguments>(call, values);
  });
}

}  // namespace roundpipe
