// Every operator that has no function of its own here: what it returns is found out at once, by tensors without data,
// and the CPU's kernel runs later on the stream's thread.
#include <algorithm>
#include <array>
#include <string_view>

#include <ATen/Functions.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "generator.h"
#include "kernels.h"

namespace fake_card {
namespace {

using Values = std::vector<c10::IValue>;

// What they return depends on values, so they wait for the stream. So does all that returns more than tensors.
constexpr std::array<std::string_view, 9> kDependsOnData = {"aten::nonzero",
                                                            "aten::masked_select",
                                                            "aten::_unique",
                                                            "aten::_unique2",
                                                            "aten::unique_dim",
                                                            "aten::unique_consecutive",
                                                            "aten::unique_dim_consecutive",
                                                            "aten::repeat_interleave",
                                                            "aten::bincount"};
// These write into a tensor of a known size, but tensors without data have no boolean masks to count.
constexpr std::array<std::string_view, 2> kKnownSize = {"aten::_index_put_impl_", "aten::masked_scatter_"};
// As on real cards, these move indices from the host by themselves.
constexpr std::array<std::string_view, 3> kTakesHostIndices = {"aten::index", "aten::_index_put_impl_",
                                                               "aten::_unsafe_index"};

template <size_t N>
bool is_one_of(const std::array<std::string_view, N>& names, const c10::OperatorHandle& op) {
  return std::find(names.begin(), names.end(), op.schema().name()) != names.end();
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

bool is_generator(const c10::Argument& argument) {
  c10::TypePtr type = argument.type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  return type->kind() == c10::TypeKind::GeneratorType;
}

// The value with each of its tensors replaced; other values stay.
template <typename Function>
c10::IValue with_tensors(const c10::IValue& value, const Function& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(replace(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector()) {
      list.push_back(tensor && tensor->defined() ? std::optional(replace(*tensor)) : std::nullopt);
    }
    return list;
  }
  return value;
}

template <typename Function>
void for_tensors(const c10::IValue& value, const Function& function) {
  with_tensors(value, [&function](const at::Tensor& tensor) {
    if (tensor.defined()) function(tensor);
    return tensor;
  });
}

// Many functions for tensors without data are written in Python.
bool is_not_implemented(const std::exception_ptr& thrown) {
  const pybind11::gil_scoped_acquire gil;
  try {
    std::rethrow_exception(thrown);
  } catch (const c10::NotImplementedError&) {
    return true;
  } catch (const pybind11::error_already_set& error) {
    return error.matches(PyExc_NotImplementedError);
  } catch (python_error& error) {
    error.persist();
    return PyErr_GivenExceptionMatches(error.type, PyExc_NotImplementedError) != 0;
  } catch (const std::exception&) {
    return false;
  }
}

std::vector<at::Tensor> tensors_of(const c10::IValue& value) {
  std::vector<at::Tensor> tensors;
  with_tensors(value, [&tensors](const at::Tensor& tensor) {
    tensors.push_back(tensor);
    return tensor;
  });
  return tensors;
}

class Call {
 public:
  Call(const c10::OperatorHandle& op, Values given) : op_(op), given_(std::move(given)), card_(find_card()) {}

  // What the operator returns, on the card.
  Values issue() {
    TORCH_CHECK_NOT_IMPLEMENTED(op_.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), "card: '", name(),
                                "' has no kernel for the CPU");
    if (card_ < 0) return make_on_host();
    const CardGuard guard(card_);
    check_devices();
    if (must_wait()) return issue_and_wait();
    std::optional<Values> shapes = shapes_of_results();
    if (!shapes) return issue_and_wait();
    return issue_with(*shapes);
  }

 private:
  std::string name() const { return c10::str(op_.operator_name()); }
  const std::vector<c10::Argument>& arguments() const { return op_.schema().arguments(); }

  c10::DeviceIndex find_card() const {
    c10::DeviceIndex card = -1;
    for (const c10::IValue& value : given_) {
      for_tensors(value, [&card](const at::Tensor& tensor) {
        if (card < 0 && on_card(tensor)) card = tensor.device().index();
      });
    }
    return card;
  }

  void check_devices() const {
    for (size_t i = 0; i < given_.size(); ++i) {
      for_tensors(given_[i], [&](const at::Tensor& tensor) {
        if (tensor.device() == c10::Device(c10::DeviceType::PrivateUse1, card_)) return;
        const bool passed_by_value = tensor.is_cpu() && !is_written(arguments()[i]) &&
                                     (tensor.dim() == 0 || (i > 0 && is_one_of(kTakesHostIndices, op_)));
        TORCH_CHECK(passed_by_value, "Expected all tensors to be on the same device, but got ", arguments()[i].name(),
                    " is on ", tensor.device(), ", different from other tensors on card:", static_cast<int>(card_),
                    " (when checking argument in ", name(), ")");
      });
    }
  }

  bool must_wait() const {
    const auto& returns = op_.schema().returns();
    const bool only_tensors = std::all_of(returns.begin(), returns.end(), [](const c10::Argument& value) {
      const c10::TypePtr type = value.type();
      return type->kind() == c10::TypeKind::TensorType || type->isSubtypeOf(*c10::ListType::ofTensors());
    });
    return !only_tensors || is_one_of(kDependsOnData, op_);
  }

  // The argument that return number `index` is; none for a new tensor.
  std::optional<size_t> returned_argument(size_t index) const {
    const c10::AliasInfo* const alias = op_.schema().returns()[index].alias_info();
    if (alias == nullptr) return {};
    TORCH_CHECK_NOT_IMPLEMENTED(alias->isWrite(), "card: '", name(), "' makes a view, which has to be written for it");
    for (size_t i = 0; i < arguments().size(); ++i) {
      const c10::AliasInfo* const other = arguments()[i].alias_info();
      if (other != nullptr && other->beforeSets() == alias->beforeSets()) return i;
    }
    TORCH_CHECK(false, "card: '", name(), "' returns what is no argument");
  }

  // Makes written arguments as large as they have to be. None when the operator cannot do without data.
  std::optional<Values> shapes_of_results() {
    if (is_one_of(kKnownSize, op_)) return Values(op_.schema().returns().size());
    if (!op_.hasComputedKernelForDispatchKey(c10::DispatchKey::Meta)) return {};
    Values metas;
    for (size_t i = 0; i < given_.size(); ++i) {
      metas.push_back(
          is_generator(arguments()[i]) ? c10::IValue() : with_tensors(given_[i], [](const at::Tensor& tensor) {
            return tensor.defined() && tensor.is_cpu() ? tensor : meta_tensor(tensor);
          }));
    }
    Values stack = metas;
    try {
      const at::AutoDispatchBelowADInplaceOrView kernels_only;
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::Meta), &stack);
    } catch (const std::exception&) {
      if (!is_not_implemented(std::current_exception())) throw;
      return {};
    }
    for (size_t i = 0; i < given_.size(); ++i) {
      if (!is_written(arguments()[i])) continue;
      const auto written = tensors_of(given_[i]);
      const auto wanted = tensors_of(metas[i]);
      for (size_t j = 0; j < written.size(); ++j) {
        if (written[j].defined() && written[j].sizes() != wanted[j].sizes()) take_shape(written[j], wanted[j]);
      }
    }
    return stack;
  }

  // The operator's arguments for the CPU's kernel, which holds nothing of the card's.
  Values for_kernel() const {
    Values values;
    for (size_t i = 0; i < given_.size(); ++i) {
      if (is_generator(arguments()[i])) {
        const auto generator =
            given_[i].isNone() ? std::optional<at::Generator>() : std::optional(given_[i].toGenerator());
        values.emplace_back(take_from(generator, card_));
      } else {
        values.push_back(with_tensors(given_[i], [](const at::Tensor& tensor) {
          return !tensor.defined() || on_card(tensor) ? alias_tensor(tensor) : value_of(tensor);
        }));
      }
    }
    return values;
  }

  // What the operator writes into: as the kernel is given it, and as it lies on the card.
  struct Written {
    at::Tensor given;
    at::Tensor place;
  };
  std::vector<Written> written_in(const Values& values) const {
    std::vector<Written> all;
    for (size_t i = 0; i < given_.size(); ++i) {
      if (!is_written(arguments()[i])) continue;
      const auto on_cards = tensors_of(given_[i]);
      const auto aliases = tensors_of(values[i]);
      for (size_t j = 0; j < aliases.size(); ++j) {
        if (aliases[j].defined()) all.push_back({aliases[j], alias_tensor(on_cards[j])});
      }
    }
    return all;
  }

  // Statistics of a norm are in fp32 on devices, and in the weight's dtype on the host.
  static void take_statistics(const c10::OperatorHandle& op, Values& stack) {
    const std::string& name = op.schema().name();
    const bool of_layers = name == "aten::native_layer_norm_backward";
    if (!of_layers && name != "aten::native_group_norm_backward") return;
    const size_t mean = of_layers ? 3 : 2;
    const at::Tensor weight = stack[mean + 2].isNone() ? at::Tensor() : stack[mean + 2].toTensor();
    const at::ScalarType dtype = weight.defined() ? weight.scalar_type() : stack[1].toTensor().scalar_type();
    for (const size_t each : {mean, mean + 1}) stack[each] = stack[each].toTensor().to(dtype);
  }

  static void run_kernel(const c10::OperatorHandle& op, Values& stack) {
    take_statistics(op, stack);
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  }

  Values issue_with(const Values& shapes) {
    Values results;
    std::vector<std::pair<size_t, std::vector<at::Tensor>>> to_fill;
    for (size_t i = 0; i < shapes.size(); ++i) {
      if (const auto argument = returned_argument(i)) {
        results.push_back(given_[*argument]);
        continue;
      }
      results.push_back(with_tensors(shapes[i], empty_as));
      std::vector<at::Tensor> aliases;
      for (const at::Tensor& tensor : tensors_of(results.back())) aliases.push_back(alias_tensor(tensor));
      to_fill.emplace_back(i, std::move(aliases));
    }
    Values values = for_kernel();
    launch(card_, name(), [op = op_, to_fill = std::move(to_fill), written = written_in(values), values] {
      Values stack = values;
      run_kernel(op, stack);
      for (const Written& each : written) {
        if (each.given.const_data_ptr() != each.place.const_data_ptr()) each.place.copy_(each.given);
      }
      for (const auto& [index, aliases] : to_fill) {
        const auto made = tensors_of(stack[index]);
        for (size_t j = 0; j < aliases.size(); ++j) {
          // What a kernel has no use for may be empty, as a batch norm's statistics are in evaluation.
          if (aliases[j].defined() && made[j].defined() && made[j].numel() > 0) aliases[j].copy_(made[j]);
        }
      }
    });
    return results;
  }

  Values issue_and_wait() {
    struct Outcome {
      Values stack;
      std::exception_ptr error;
    };
    const auto outcome = std::make_shared<Outcome>();
    const Values values = for_kernel();
    launch(card_, name(), [op = op_, outcome, values] {
      try {
        outcome->stack = values;
        run_kernel(op, outcome->stack);
      } catch (...) {
        outcome->error = std::current_exception();
      }
    });
    current_stream(card_).synchronize();
    if (outcome->error) std::rethrow_exception(outcome->error);
    for (size_t i = 0; i < given_.size(); ++i) {
      if (!is_written(arguments()[i])) continue;
      const auto on_cards = tensors_of(given_[i]);
      const auto made = tensors_of(values[i]);
      for (size_t j = 0; j < made.size(); ++j) {
        if (!made[j].defined() || made[j].const_data_ptr() == alias_tensor(on_cards[j]).const_data_ptr()) continue;
        take_shape(on_cards[j], made[j]);
        copy_values(on_cards[j], made[j], false);
      }
    }
    Values results;
    for (size_t i = 0; i < outcome->stack.size(); ++i) {
      if (const auto argument = returned_argument(i)) {
        results.push_back(given_[*argument]);
      } else {
        results.push_back(
            with_tensors(outcome->stack[i], [this](const at::Tensor& tensor) { return to_card(tensor); }));
      }
    }
    return results;
  }

  static at::Tensor to_card(const at::Tensor& made) {
    if (!made.defined()) return {};
    const at::Tensor result = empty_as(made);
    copy_values(result, made, false);
    return result;
  }

  // For operators that are given a device and no tensor.
  Values make_on_host() {
    const CardGuard guard(named_card());
    for (c10::IValue& value : given_) {
      if (value.isDevice()) value = c10::Device(c10::kCPU);
    }
    run_kernel(op_, given_);
    Values results;
    for (const c10::IValue& value : given_) results.push_back(with_tensors(value, to_card));
    return results;
  }

  c10::DeviceIndex named_card() const {
    for (const c10::IValue& value : given_) {
      if (value.isDevice() && value.toDevice().is_privateuseone()) return value.toDevice().index();
    }
    return -1;
  }

  const c10::OperatorHandle op_;
  Values given_;
  const c10::DeviceIndex card_;
};

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet /*keys*/, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  Call call(op, Values(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end()));
  Values results = call.issue();
  torch::jit::drop(*stack, count);
  for (c10::IValue& result : results) stack->push_back(std::move(result));
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// torch has formulas for devices without a kernel of their own, whose last bits are not those of the CPU's kernel.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name :
       {"native_layer_norm", "native_group_norm", "addr", "addr.out", "silu_backward", "mish_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}

}  // namespace
}  // namespace fake_card
