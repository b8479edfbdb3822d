#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <roundpipe/api/host_weights.h>
#include <roundpipe/api/learning_rate.h>
#include <roundpipe/api/step.h>
#include <roundpipe/optim/hyperparameters.h>
#include <roundpipe/storage/disk_options.h>

namespace roundpipe::cluster {
class Nodes;
}

namespace roundpipe {

// An update rule and its hyperparameters. Made from libtorch's options, with libtorch's defaults:
// Optimizer(model, torch::optim::AdamWOptions(1e-3)); or of any algorithm, with the defaults of torch.optim (Lion: of
// its authors), to be changed in `options`.
struct UpdateRule {
  UpdateRule(const torch::optim::AdamOptions& from);
  UpdateRule(const torch::optim::AdamWOptions& from);
  UpdateRule(const torch::optim::SGDOptions& from);
  UpdateRule(const torch::optim::AdagradOptions& from);
  UpdateRule(const torch::optim::RMSpropOptions& from);
  UpdateRule(optim::Algorithm algorithm);

  optim::Algorithm algorithm;
  optim::Hyperparameters options;
};

// Parameters with hyperparameters of their own.
struct ParameterGroup {
  // Whether the group has the parameter, by its name ("0.weight": layer, then name in the layer) and its tensor.
  std::function<bool(const std::string& name, const at::Tensor& parameter)> holds;
  // Those that are given here; the others are the rule's, as in torch's groups: {.weight_decay = 0}.
  optim::GivenHyperparameters options = {};
};

// How an optimizer keeps its state.
struct OptimizerFormat {
  // Of the moments: fp32, or one byte each (Adam and AdamW only).
  optim::MomentFormat moments = optim::MomentFormat::kFloat32;
  // Of the fp32 masters of 16-bit weights: exact, or 24 bits (bf16 weights only).
  optim::MasterFormat masters = optim::MasterFormat::kFloat32;
  // Keep the gradients of 16-bit weights in fp32 on the host, to sum them over several calls before a step.
  bool gradients_in_fp32 = false;
  // Use each gradient as soon as it is on the host, and keep room for those of a few layers only, instead of a place
  // for all. Each forward_backward is then followed by a synchronous step without a scaler, and with
  // another `clip_by` than kNorm if gradients are clipped.
  bool gradients_at_once = false;
  // A disk for the moments, and the masters if it holds them, that host memory has no room for. The bits are the same.
  DiskOptions disk = {};
  // Processes that train the same model, from equal weights, each with rows and devices of its own, and that make the
  // same steps: gradients are added over all of them, and each keeps the state of a part of every layer. Then making an
  // optimizer and each step are collective, and throw std::invalid_argument on all of them, saying what differs, if
  // models, weights, optimizers or options do. See docs/several-machines.md. Null: there is one process.
  std::shared_ptr<cluster::Nodes> nodes = nullptr;
};

// A fused optimizer: step() updates each layer in place, on the host, as soon as its gradient has landed. 16-bit
// weights have fp32 masters, of which only the missing part takes memory.
//
// It steps one model, or the models of a ModelGroup together with parameters that the program itself uses; then the
// norm, a scaler's decision, zero_grad() and Model::synchronize() are those of all.
//
// Another optimizer may be made for the same ones; it replaces this one, whose steps are then refused.
// Of an optimizer that was moved from, every function but assignment throws std::invalid_argument.
// Ownership: keeps what it needs of the model. Thread safety: the caller's thread.
class Optimizer {
 public:
  // For the parameters of `model` that require grad now. A parameter is in the first group that holds it, else in a
  // last group with the options of `rule`. Waits for the model's work. Throws std::invalid_argument if there are none,
  // a group has none, or an option or dtype does not fit; then nothing has been changed.
  Optimizer(HostWeights& model, const UpdateRule& rule, const std::vector<ParameterGroup>& groups = {},
            const OptimizerFormat& format = {});
  // The same for the models of a ModelGroup and its parameters, which are leaves on the CPU. Throws
  // std::invalid_argument as well if a model is stepped together with others already, or a parameter is in a model.
  Optimizer(const SteppedWeights& stepped, const UpdateRule& rule, const std::vector<ParameterGroup>& groups = {},
            const OptimizerFormat& format = {});
  Optimizer(const Optimizer&) = default;
  Optimizer& operator=(const Optimizer&) = default;
  Optimizer(Optimizer&&) = default;
  Optimizer& operator=(Optimizer&& other) noexcept;

  // Updates all that it was made for with the gradients since the last step; of parameters of the program, those in
  // `.grad`. Returns at once, unless two steps are in progress already. See StepOptions and Step.
  // Throws std::invalid_argument if another optimizer was made since, or for an option that does not fit; or what an
  // earlier step or call threw: then no step was made.
  Step step(const StepOptions& options = {});

  // For exact clipping in two passes by an optimizer that uses gradients at once: returns the norm of the gradients of
  // the last forward_backward, which are dropped as they land, and leaves everything as it was before that call, so
  // that the same batch draws the same random numbers again. After that batch's second forward_backward, a step with
  // ClipBy::kMeasuredNorm clips by this norm; it refuses another batch, whose losses tell. Blocks until the last
  // gradient has landed. Throws std::invalid_argument if another optimizer was made since, gradients wait for steps, or
  // there are none; or what a step or call threw.
  double measure_gradients();

  // The hyperparameters of all groups, of group `index`, and of the last one, which is that of the rule. Changes hold
  // from the next step on.
  std::span<optim::Hyperparameters> param_groups();
  optim::Hyperparameters& options(size_t index);
  optim::Hyperparameters& options();

  // Drops the gradients that no step has consumed, without waiting. A step leaves none.
  void zero_grad();

  // From now on, each group's learning rate is the one that it has now times `factor` of the number of steps made;
  // null: the rates stay as they are. What `factor` throws leaves everything as it was, here and below.
  void set_learning_rate(LearningRate factor);
  // The number of steps begun, which the schedule goes by.
  int64_t steps() const;
  void set_steps(int64_t steps);

  // -- for Model and checkpoints --
  const std::shared_ptr<runtime::ModelOptimizer>& core() const;
  const std::shared_ptr<FusedSteps>& fused_steps() const;
  const std::vector<optim::Hyperparameters>& all_options() const;
  optim::Algorithm algorithm() const { return algorithm_; }
  optim::MomentFormat moments() const { return moments_; }
  // The learning rates that the schedule goes by; empty without one.
  const std::vector<double>& first_rates() const { return first_rates_; }
  // Continues after `steps` steps. `first_rates` matter if there is a schedule. REQUIRES: as many as there are groups.
  void restore(std::vector<optim::Hyperparameters> options, std::vector<double> first_rates, int64_t steps);

 private:
  // Throws std::invalid_argument if another optimizer was made since.
  void require_latest(const char* where) const;
  // The learning rates after `steps` steps; empty without a schedule. Throws what the schedule throws, and
  // std::invalid_argument if it returns no rate.
  std::vector<double> rates_after(int64_t steps) const;
  // `first` rates, times `factor` of the number of steps.
  static std::vector<double> scheduled(const std::vector<double>& first, const LearningRate& factor, int64_t steps);
  void set_rates(const std::vector<double>& rates) noexcept;

  std::shared_ptr<FusedSteps> fused_;
  std::shared_ptr<runtime::ModelOptimizer> core_;  // null: moved from
  optim::Algorithm algorithm_;
  optim::MomentFormat moments_;
  std::vector<optim::Hyperparameters> options_;
  std::vector<double> first_rates_;
  LearningRate factor_;
  int64_t steps_ = 0;
};

}  // namespace roundpipe
