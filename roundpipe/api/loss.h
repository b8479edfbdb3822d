#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

#include <roundpipe/api/layer.h>
#include <roundpipe/api/microbatches.h>
#include <roundpipe/runtime/model/values.h>

namespace roundpipe::runtime {
class Loss;
struct LossRows;
}  // namespace roundpipe::runtime

namespace roundpipe {

namespace detail {

// The type of one microbatch's value.
template <typename T>
struct PartOf {
  using Type = T;
};
template <typename T>
struct PartOf<Microbatches<T>> {
  using Type = T;
};
template <typename T>
using Part = typename PartOf<T>::Type;

inline std::vector<at::Tensor> as_losses(at::Tensor loss) { return {std::move(loss)}; }
inline std::vector<at::Tensor> as_losses(std::vector<at::Tensor> losses) { return losses; }

// The arguments of a loss: those that it declares or, for a generic function, a tensor and the label.
template <typename Function, typename Label, bool declares>
struct LossArguments {
  using Values = typename Signature<Function>::Values;
};
template <typename Function, typename Label>
struct LossArguments<Function, Label, false> {
  using Values = std::conditional_t<std::is_invocable_v<const Function&, at::Tensor, Label>,
                                    std::tuple<at::Tensor, Label>, std::tuple<at::Tensor>>;
};
template <typename F>
constexpr bool kDeclares = requires { &F::operator(); } || std::is_pointer_v<F>;

}  // namespace detail

// Makes a loss of `function(outputs)` or `function(outputs, label)`, which returns a tensor or a vector of tensors. Its
// arguments say as what the values are read; a generic function (auto) gets a tensor and the label as it was passed.
template <typename Label, typename Function>
LossFunction loss_function(Function function) {
  using Arguments = typename detail::LossArguments<Function, Label, detail::kDeclares<Function>>::Values;
  static_assert(std::tuple_size_v<Arguments> == 1 || std::tuple_size_v<Arguments> == 2,
                "a loss takes the outputs, or the outputs and the label");
  return [function = std::move(function)](const runtime::Values& outputs, const runtime::Values& label) {
    using Output = std::tuple_element_t<0, Arguments>;
    if constexpr (std::tuple_size_v<Arguments> == 1) {
      return detail::as_losses(function(join<Output>(outputs)));
    } else {
      return detail::as_losses(function(join<Output>(outputs), join<std::tuple_element_t<1, Arguments>>(label)));
    }
  };
}

// The loss as the engine calls it, for these microbatches. Throws std::invalid_argument for a result that is no scalar.
std::shared_ptr<runtime::Loss> make_loss(LossFunction function, std::vector<runtime::LossRows> microbatches,
                                         std::optional<LossReduction> reduction);

}  // namespace roundpipe
