#pragma once

#include <array>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <utility>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any_value.h>
#include <torch/ordered_dict.h>

#include <roundpipe/runtime/model/values.h>

namespace roundpipe {

// Which tensors a value holds, and so what may be passed to a model, between its layers, to a loss and back.
//
// Known are: at::Tensor; std::vector, std::array, std::tuple, std::pair, std::optional, std::map and torch::OrderedDict
// of known types; numbers, enums and strings, which hold none. For a struct of your own, specialise TensorsOf, naming
// the members that hold tensors, always in the same order:
//
//   template <>
//   struct roundpipe::TensorsOf<Tokens> {
//     template <typename Visit>
//     static void visit(Tokens& value, Visit&& visit) { visit(value.hidden); visit(value.mask); }
//   };
//
// A member may be of any known type. Everything else in the struct is copied with it, so the struct must be copyable.
// An undefined tensor stays undefined.
template <typename T>
struct TensorsOf {
  static constexpr bool kUnknown = true;
};

namespace detail {

template <typename T>
constexpr bool kHoldsNone = std::is_arithmetic_v<T> || std::is_enum_v<T> || std::is_same_v<T, std::string> ||
                            std::is_same_v<T, std::monostate> || std::is_same_v<T, std::nullopt_t>;

// Nothing but tensors, in a row: values of such types can be read as one another if the number of tensors is the same.
template <typename T>
struct IsRow : std::false_type {};
template <>
struct IsRow<at::Tensor> : std::true_type {};
template <>
struct IsRow<std::vector<at::Tensor>> : std::true_type {};
template <size_t n>
struct IsRow<std::array<at::Tensor, n>> : std::true_type {};
template <typename... T>
struct IsRow<std::tuple<T...>> : std::conjunction<std::is_same<T, at::Tensor>...> {};
template <typename A, typename B>
struct IsRow<std::pair<A, B>> : std::conjunction<std::is_same<A, at::Tensor>, std::is_same<B, at::Tensor>> {};

template <typename T>
struct IsTuple : std::false_type {};
template <typename... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};

template <typename T, typename Visit>
void visit_tensors(T& value, Visit& visit);

// One overload for each kind of container; the last one takes the trait.
template <typename T, typename Visit>
void visit_parts(std::vector<T>& value, Visit& visit) {
  for (T& part : value) visit_tensors(part, visit);
}
template <typename T, size_t n, typename Visit>
void visit_parts(std::array<T, n>& value, Visit& visit) {
  for (T& part : value) visit_tensors(part, visit);
}
template <typename... T, typename Visit>
void visit_parts(std::tuple<T...>& value, Visit& visit) {
  std::apply([&](T&... parts) { (visit_tensors(parts, visit), ...); }, value);
}
template <typename A, typename B, typename Visit>
void visit_parts(std::pair<A, B>& value, Visit& visit) {
  visit_tensors(value.first, visit);
  visit_tensors(value.second, visit);
}
template <typename T, typename Visit>
void visit_parts(std::optional<T>& value, Visit& visit) {
  if (value) visit_tensors(*value, visit);
}
template <typename Key, typename T, typename Visit>
void visit_parts(std::map<Key, T>& value, Visit& visit) {
  for (auto& entry : value) visit_tensors(entry.second, visit);
}
template <typename Key, typename T, typename Visit>
void visit_parts(torch::OrderedDict<Key, T>& value, Visit& visit) {
  for (auto& entry : value) visit_tensors(entry.value(), visit);
}
template <typename T, typename Visit>
void visit_parts(T& value, Visit& visit) {
  static_assert(
      !requires { TensorsOf<T>::kUnknown; },
      "roundpipe does not know which tensors this type holds: specialise roundpipe::TensorsOf for it");
  TensorsOf<T>::visit(value, [&](auto& part) { visit_tensors(part, visit); });
}

// Calls `visit` with each tensor in `value`, in order.
template <typename T, typename Visit>
void visit_tensors(T& value, Visit& visit) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    visit(value);
  } else if constexpr (!kHoldsNone<T>) {
    visit_parts(value, visit);
  }
}

}  // namespace detail

// A value without its tensors: what the engine passes on unchanged beside them (runtime::Values::structure).
// Thread safety: never changes; any thread.
class Structure {
 public:
  virtual ~Structure() = default;
  virtual const std::type_info& type() const = 0;
  // Whether the value is nothing but tensors in a row, and may be read as another such value.
  virtual bool is_row() const = 0;
  // The value as torch::nn::AnyModule takes it: one argument or, if the value is the arguments of a call, its elements.
  virtual std::vector<torch::nn::AnyValue> arguments(const std::vector<at::Tensor>& tensors) const = 0;

  // The structure of values that were made by split(); throws Error for others.
  static const Structure& of(const runtime::Values& values);
  // Throws std::invalid_argument: a `wanted` was expected.
  [[noreturn]] static void refuse(const runtime::Values& values, const std::type_info& wanted);
};

template <typename T>
class StructureOf final : public Structure {
 public:
  // Moves the tensors out of `value`, in order. `is_call`: a tuple, whose elements are the arguments of a call.
  StructureOf(T value, std::vector<at::Tensor>& tensors, bool is_call) : rest_(std::move(value)), is_call_(is_call) {
    auto take = [&](at::Tensor& tensor) {
      defined_.push_back(tensor.defined());
      if (tensor.defined()) tensors.push_back(std::exchange(tensor, at::Tensor()));
    };
    detail::visit_tensors(rest_, take);
  }

  const std::type_info& type() const override { return typeid(T); }
  bool is_row() const override { return detail::IsRow<T>::value; }

  // The value with `tensors` in their places.
  T join(const std::vector<at::Tensor>& tensors) const {
    T value = rest_;
    size_t place = 0;
    auto defined = defined_.begin();
    auto put = [&](at::Tensor& tensor) {
      if (*defined++) tensor = tensors[place++];
    };
    detail::visit_tensors(value, put);
    return value;
  }

  std::vector<torch::nn::AnyValue> arguments(const std::vector<at::Tensor>& tensors) const override {
    std::vector<torch::nn::AnyValue> arguments;
    if constexpr (detail::IsTuple<T>::value) {
      if (is_call_) {
        std::apply([&](auto&&... parts) { (arguments.emplace_back(std::move(parts)), ...); }, join(tensors));
        return arguments;
      }
    }
    arguments.emplace_back(join(tensors));
    return arguments;
  }

 private:
  T rest_;
  bool is_call_;
  std::vector<char> defined_;  // of each tensor
};

// Splits a value into its tensors and the rest, as the engine moves it. `is_call`: a tuple, whose elements are the
// arguments of a call.
template <typename T>
runtime::Values split(T value, bool is_call = false) {
  runtime::Values values;
  values.structure = std::shared_ptr<const Structure>(new StructureOf<T>(std::move(value), values.tensors, is_call));
  return values;
}

// The value that split() took apart, with other tensors in the places of its own. Also reads a row of tensors as
// another one of the same length: a tensor, a tuple, pair, vector or array of tensors. Throws std::invalid_argument if
// the value is of another type.
template <typename T>
T join(const runtime::Values& values) {
  const Structure& structure = Structure::of(values);
  if (structure.type() == typeid(T)) return static_cast<const StructureOf<T>&>(structure).join(values.tensors);
  if constexpr (detail::IsRow<T>::value) {
    if (structure.is_row()) {
      T value{};
      if constexpr (std::is_same_v<T, std::vector<at::Tensor>>) value.resize(values.tensors.size());
      size_t places = 0;
      auto count = [&](at::Tensor&) { ++places; };
      detail::visit_tensors(value, count);
      if (places == values.tensors.size()) {
        size_t place = 0;
        auto put = [&](at::Tensor& tensor) { tensor = values.tensors[place++]; };
        detail::visit_tensors(value, put);
        return value;
      }
    }
  }
  Structure::refuse(values, typeid(T));
}

}  // namespace roundpipe
