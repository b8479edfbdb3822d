#include <roundpipe/runs/torch_optimizer.h>

#include <memory>
#include <stdexcept>

#include <ATen/ops/full.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <roundpipe/api/optimizer.h>
#include <roundpipe/core/error.h>

namespace roundpipe {

using optim::Algorithm;
using optim::Hyperparameters;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

namespace {

using Entries = std::vector<std::pair<std::string, StateValue>>;

void put(Entries& entries, const char* name, const at::Tensor& tensor) {
  if (tensor.defined()) entries.emplace_back(name, tensor);
}

// PyTorch counts steps in tensors.
void put_step(Entries& entries, int64_t step) {
  entries.emplace_back("step", at::full({}, static_cast<double>(step), at::kFloat));
}

template <typename State>
void put_moments(Entries& entries, const State& state) {
  put_step(entries, state.step());
  put(entries, "exp_avg", state.exp_avg());
  put(entries, "exp_avg_sq", state.exp_avg_sq());
  put(entries, "max_exp_avg_sq", state.max_exp_avg_sq());
}

Entries entries_of(Algorithm algorithm, const OptimizerParamState& state) {
  Entries entries;
  switch (algorithm) {
    case Algorithm::kAdam:
      put_moments(entries, static_cast<const torch::optim::AdamParamState&>(state));
      break;
    case Algorithm::kAdamW:
      put_moments(entries, static_cast<const torch::optim::AdamWParamState&>(state));
      break;
    case Algorithm::kSGD:
      put(entries, "momentum_buffer", static_cast<const torch::optim::SGDParamState&>(state).momentum_buffer());
      break;
    case Algorithm::kAdagrad: {
      const auto& sums = static_cast<const torch::optim::AdagradParamState&>(state);
      put_step(entries, sums.step());
      put(entries, "sum", sums.sum());
      break;
    }
    default: {
      const auto& squares = static_cast<const torch::optim::RMSpropParamState&>(state);
      put_step(entries, squares.step());
      put(entries, "square_avg", squares.square_avg());
      put(entries, "momentum_buffer", squares.momentum_buffer());
      put(entries, "grad_avg", squares.grad_avg());
      break;
    }
  }
  return entries;
}

// The saved tensor in the dtype and shape of the parameter; undefined if there is none.
at::Tensor taken(const StateValue& saved, const char* name, const at::Tensor& parameter) {
  const StateValue* const value = saved.find(name);
  if (value == nullptr || value->is_none()) return {};
  const at::Tensor& tensor = value->as_tensor();
  if (tensor.sizes() != parameter.sizes()) {
    throw std::invalid_argument(concat("[load_checkpoint] the optimizer's ", name, " has sizes ", tensor.sizes(),
                                       ", expected ", parameter.sizes(), "; make the optimizer as it was"));
  }
  return tensor.to(parameter.options().requires_grad(false), /*non_blocking=*/false, /*copy=*/true);
}

int64_t step_in(const StateValue& saved) {
  const StateValue& step = saved.at("step");
  const at::Tensor* const tensor = std::get_if<at::Tensor>(&step.content());
  if (tensor == nullptr) return step.as_int();
  if (tensor->numel() != 1) throw WrongStateType("[checkpoint] a saved 'step' has several numbers, expected one");
  return tensor->item<int64_t>();
}

template <typename State>
std::unique_ptr<State> moments_from(const StateValue& saved, const at::Tensor& parameter) {
  auto state = std::make_unique<State>();
  state->step(step_in(saved));
  state->exp_avg(taken(saved, "exp_avg", parameter));
  state->exp_avg_sq(taken(saved, "exp_avg_sq", parameter));
  state->max_exp_avg_sq(taken(saved, "max_exp_avg_sq", parameter));
  return state;
}

std::unique_ptr<OptimizerParamState> state_from(Algorithm algorithm, const StateValue& saved,
                                                const at::Tensor& parameter) {
  switch (algorithm) {
    case Algorithm::kAdam:
      return moments_from<torch::optim::AdamParamState>(saved, parameter);
    case Algorithm::kAdamW:
      return moments_from<torch::optim::AdamWParamState>(saved, parameter);
    case Algorithm::kSGD: {
      at::Tensor momentum = taken(saved, "momentum_buffer", parameter);
      if (!momentum.defined()) return nullptr;
      auto state = std::make_unique<torch::optim::SGDParamState>();
      state->momentum_buffer(std::move(momentum));
      return state;
    }
    case Algorithm::kAdagrad: {
      auto state = std::make_unique<torch::optim::AdagradParamState>();
      state->step(step_in(saved));
      state->sum(taken(saved, "sum", parameter));
      return state;
    }
    default: {
      auto state = std::make_unique<torch::optim::RMSpropParamState>();
      state->step(step_in(saved));
      state->square_avg(taken(saved, "square_avg", parameter));
      state->momentum_buffer(taken(saved, "momentum_buffer", parameter));
      state->grad_avg(taken(saved, "grad_avg", parameter));
      return state;
    }
  }
}

template <typename Options>
void set_adam(Options& options, const Hyperparameters& from) {
  options.lr(from.lr);
  options.betas({from.beta1, from.beta2});
  options.eps(from.eps);
  options.weight_decay(from.weight_decay);
  options.amsgrad(from.amsgrad);
}

template <typename Options>
Options& as(OptimizerParamGroup& group) {
  return static_cast<Options&>(group.options());
}

}  // namespace

Algorithm algorithm_of(const torch::optim::Optimizer& optimizer, const char* where) {
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer) != nullptr) return Algorithm::kAdam;
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer) != nullptr) return Algorithm::kAdamW;
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer) != nullptr) return Algorithm::kSGD;
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer) != nullptr) return Algorithm::kAdagrad;
  if (dynamic_cast<const torch::optim::RMSprop*>(&optimizer) != nullptr) return Algorithm::kRMSprop;
  throw std::invalid_argument(concat("[", where,
                                     "] the optimizer is of a class whose state has no documented form, expected "
                                     "libtorch's Adam, AdamW, SGD, Adagrad or RMSprop, or a roundpipe::Optimizer"));
}

std::vector<Hyperparameters> options_of(const torch::optim::Optimizer& optimizer) {
  const Algorithm algorithm = algorithm_of(optimizer, "checkpoint");
  std::vector<Hyperparameters> all;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    const torch::optim::OptimizerOptions& options = group.options();
    switch (algorithm) {
      case Algorithm::kAdam:
        all.push_back(UpdateRule(static_cast<const torch::optim::AdamOptions&>(options)).options);
        break;
      case Algorithm::kAdamW:
        all.push_back(UpdateRule(static_cast<const torch::optim::AdamWOptions&>(options)).options);
        break;
      case Algorithm::kSGD:
        all.push_back(UpdateRule(static_cast<const torch::optim::SGDOptions&>(options)).options);
        break;
      case Algorithm::kAdagrad:
        all.push_back(UpdateRule(static_cast<const torch::optim::AdagradOptions&>(options)).options);
        break;
      default:
        all.push_back(UpdateRule(static_cast<const torch::optim::RMSpropOptions&>(options)).options);
        break;
    }
  }
  return all;
}

void set_options(torch::optim::Optimizer& optimizer, const std::vector<Hyperparameters>& options) {
  const Algorithm algorithm = algorithm_of(optimizer, "checkpoint");
  for (size_t i = 0; i < options.size(); ++i) {
    OptimizerParamGroup& group = optimizer.param_groups().at(i);
    const Hyperparameters& from = options[i];
    if (from.maximize || from.decoupled_weight_decay) {
      throw std::invalid_argument(
          "[load_checkpoint] the saved optimizer has maximize or decoupled_weight_decay on, which libtorch does not "
          "have; load the checkpoint from Python, or use a roundpipe::Optimizer from the start");
    }
    switch (algorithm) {
      case Algorithm::kAdam:
        set_adam(as<torch::optim::AdamOptions>(group), from);
        break;
      case Algorithm::kAdamW:
        set_adam(as<torch::optim::AdamWOptions>(group), from);
        break;
      case Algorithm::kSGD: {
        auto& own = as<torch::optim::SGDOptions>(group);
        own.lr(from.lr);
        own.momentum(from.momentum).dampening(from.dampening).weight_decay(from.weight_decay).nesterov(from.nesterov);
        break;
      }
      case Algorithm::kAdagrad: {
        auto& own = as<torch::optim::AdagradOptions>(group);
        own.lr(from.lr);
        own.lr_decay(from.lr_decay).weight_decay(from.weight_decay).eps(from.eps);
        own.initial_accumulator_value(from.initial_accumulator_value);
        break;
      }
      default: {
        auto& own = as<torch::optim::RMSpropOptions>(group);
        own.lr(from.lr);
        own.alpha(from.alpha).eps(from.eps).weight_decay(from.weight_decay);
        own.momentum(from.momentum).centered(from.centered);
        break;
      }
    }
  }
}

StateValue state_of(torch::optim::Optimizer& optimizer) {
  const Algorithm algorithm = algorithm_of(optimizer, "save_checkpoint");
  StateValue::Dict all;
  int64_t number = 0;
  for (const OptimizerParamGroup& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found != optimizer.state().end())
        all.emplace_back(number, StateValue::dict(entries_of(algorithm, *found->second)));
      ++number;
    }
  }
  return all;
}

std::function<void()> read_state(torch::optim::Optimizer& optimizer, const StateValue& state) {
  const Algorithm algorithm = algorithm_of(optimizer, "load_checkpoint");
  std::vector<at::Tensor> parameters;
  for (const OptimizerParamGroup& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  using States = std::vector<std::pair<at::Tensor, std::unique_ptr<OptimizerParamState>>>;
  const auto states = std::make_shared<States>();
  for (const auto& [key, saved] : state.entries()) {
    const auto number = static_cast<size_t>(key.as_int());
    if (number >= parameters.size()) {
      throw std::invalid_argument(concat("[load_checkpoint] the saved optimizer has a state of parameter ", number,
                                         ", expected less than ", parameters.size(), "; make it as it was"));
    }
    auto made = state_from(algorithm, saved, parameters[number]);
    if (made) states->emplace_back(parameters[number], std::move(made));
  }
  return [&optimizer, states] {
    optimizer.state().clear();
    for (auto& [parameter, made] : *states) optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(made);
  };
}

}  // namespace roundpipe
