#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/nn/modules/container/sequential.h>
#include <torch/optim/optimizer.h>

#include <roundpipe/api/grad_scaler.h>
#include <roundpipe/api/host_weights.h>
#include <roundpipe/api/layer.h>
#include <roundpipe/api/loss.h>
#include <roundpipe/api/microbatches.h>
#include <roundpipe/api/optimizer.h>
#include <roundpipe/api/step.h>
#include <roundpipe/core/arithmetic.h>
#include <roundpipe/runtime/call/execution_record.h>
#include <roundpipe/runtime/call/run_options.h>
#include <roundpipe/schedule/layer_cost.h>
#include <roundpipe/training/memory_prediction.h>

namespace roundpipe {

class CallCount;
class LanguageModel;
class PendingCall;
struct CallArguments;

struct ModelOptions {
  // Keys the model's random numbers, and appears in messages. Empty: "Sequential" or "Model". Two models of one process
  // should have different names.
  std::string name = {};
  // The options of calls that are given none.
  RunOptions run = {};
  // Page-lock the weights on the host if accelerators read them.
  bool pin = true;
  // A NaN loss is an error (see forward_backward), unless a GradScaler belongs to the model or the environment has
  // ROUNDPIPE_CHECK_LOSS=0.
  bool check_loss = true;
  // How the layers compute, for checkpoints; unset where they have no two forms.
  std::optional<Arithmetic> arithmetic = std::nullopt;
  // Limits in bytes: on the host, for the model, its gradients and a fused optimizer; and for a step, on each device.
  // Steps are planned within them, and what cannot fit is refused (BudgetExceeded) before it runs.
  std::optional<int64_t> host_memory = std::nullopt;
  std::optional<int64_t> device_memory = std::nullopt;
  // Without device_memory, on devices with a limit of their own, the first step of a kind, and each that is larger than
  // those before, is measured before it runs, as predict_memory does, and planned within the limit: layers keep their
  // activations where there is room, and recompute one by one where there is little. Its loss function is called once
  // more for that.
  bool measure_steps = true;
};

// Losses and outputs of a batch.
struct TrainResult {
  // What was differentiated: the loss of the batch, added over the losses of the loss function. On the host.
  at::Tensor loss;
  // Each loss that the function returned, of the batch.
  std::vector<at::Tensor> losses;
  // The merged outputs, if they were asked for: roundpipe::join<Type>(result.outputs). Detached.
  std::optional<runtime::Values> outputs;
};

// Trains layers whose weights stay on the host, on devices that hold a part of them at a time. The results have the
// bits of a plain loop over the same microbatches, for any devices: docs/exactness.md.
//
// Ownership: shares the layers' modules, whose parameters become views of flat host blocks. Their values may be changed
// in place after synchronize(). What was submitted goes on when the model is dropped; but if a step has begun, dropping
// it waits for all work, so that the modules are left with the newest weights.
// Thread safety: one thread at a time, not a layer's or a loss's.
// Errors: a call throws what its layers and its loss threw, with their own types, or what work from an earlier call
// threw; the failed call's gradients are dropped, and the model can be used again. Error says the engine's own, such as
// DeviceError for a device that has failed.
class Model : public HostWeights {
 public:
  // Of the children of a torch::nn::Sequential, or of layers (see layer()). Throws std::invalid_argument if there are
  // none, for a module that cannot be copied, for a parameter that is not on the CPU, and for one that another Model
  // has which lives: let that one go first.
  explicit Model(const torch::nn::Sequential& layers, ModelOptions options = {});
  explicit Model(std::vector<Layer> layers, ModelOptions options = {});
  Model(Model&&) = default;
  Model& operator=(Model&& other) noexcept;

  // Runs the model over `arguments`, those of the first layer's forward, and returns the merged outputs (see
  // detail::merged) as an `Output`. If gradients are wanted, they carry a graph whose backward runs on the devices.
  // Blocks until the outputs are there.
  template <typename Output = at::Tensor, typename... Arguments>
  Output forward(Arguments... arguments) {
    return forward_with<Output>(run_options_, std::move(arguments)...);
  }
  template <typename Output = at::Tensor, typename... Arguments>
  Output forward_with(const RunOptions& options, Arguments... arguments) {
    return join<Output>(detail::merged(run(packed(std::move(arguments)...), options), options.output_device));
  }
  // The outputs of each microbatch, unmerged.
  template <typename Output = at::Tensor, typename... Arguments>
  std::vector<Output> forward_microbatches(const RunOptions& options, Arguments... arguments) {
    std::vector<Output> outputs;
    for (const runtime::Values& part : run(packed(std::move(arguments)...), options))
      outputs.push_back(join<Output>(part));
    return outputs;
  }

  class Pending;

  // Runs forward, loss and backward of one batch. Gradients add up until a step. Returns as soon as the losses are
  // known, while the backward may still run. Without a fused optimizer, it waits for the backward, too, and leaves the
  // gradients in the parameters' `.grad`, as a plain loop does.
  //
  // `inputs`: a value, a std::tuple of the arguments of the first layer, or Microbatches of these. `labels`: a value or
  // Microbatches; std::tuple<>() for none. `loss`: a function of the outputs and the label of a microbatch, or of the
  // outputs alone; returns a scalar, or a vector of scalars whose sum is differentiated. It runs on devices' threads.
  //
  // The loss of the batch is that of all rows at once, whatever their number of microbatches, for a sum over rows, for
  // a mean over them, and for a mean over those integer labels that are not negative. Which of them a loss is, the
  // first microbatch of each call tells: besides on all of its rows, the function is called on two parts of them (on a
  // single row, twice over), and once more each if these losses cancel out. What is neither a sum nor a mean is added
  // over the microbatches as it is, which a warning says once. RunOptions::loss_reduction says it instead.
  //
  // Throws Error if a loss is NaN; the batch's gradients are dropped then. Throws std::invalid_argument for a batch, an
  // option or a loss that does not fit, or if gradients are off.
  template <typename Inputs, typename Labels, typename Loss>
  TrainResult forward_backward(Inputs inputs, Labels labels, Loss loss) {
    return forward_backward(std::move(inputs), std::move(labels), std::move(loss), run_options_);
  }
  template <typename Inputs, typename Labels, typename Loss>
  TrainResult forward_backward(Inputs inputs, Labels labels, Loss loss, const RunOptions& options,
                               bool keep_outputs = false);

  // Starts the work of forward_backward and returns at once, so that devices have the next batch before the last loss
  // is read. A NaN loss is found on the device, before its gradients are used. The inputs and labels may be changed at
  // once.
  template <typename Inputs, typename Labels, typename Loss>
  Pending submit(Inputs inputs, Labels labels, Loss loss);
  template <typename Inputs, typename Labels, typename Loss>
  Pending submit(Inputs inputs, Labels labels, Loss loss, const RunOptions& options, bool keep_outputs = false);

  // Optimizer::step of a fused optimizer, and so of all that it was made for. Throws std::invalid_argument as well if
  // it was not made for this model.
  Step step(Optimizer& optimizer, const StepOptions& options = {});
  // Optimizer::measure_gradients, likewise.
  double measure_gradients(Optimizer& optimizer);
  // Updates the weights by an optimizer of libtorch over the parameters of the layers: waits for all work, so that
  // `.grad` holds the sums; unscales and clips; steps unless a scaled gradient is inf or NaN; and clears the gradients.
  // `options.asynchronous` does not apply: such a step is over when this returns.
  Step step(torch::optim::Optimizer& optimizer, const StepOptions& options = {});

  // Updates the weights by a function, which runs on a thread of its own once all gradients have landed, and updates
  // optimizer_parameters() with any optimizer: it finds their gradients, and clears them. `asynchronous`: the next call
  // still reads the weights from before this step, so the function runs beside it, and the call after reads this
  // step's; else waits for the function. If a call whose gradients it was to use has failed, it does not run. What it
  // throws is thrown by whatever waits for it: this call if it waits, the next step, or synchronize(). What it refers
  // to has to live until then.
  void step(std::function<void()> update, bool asynchronous = true);
  // The same with the other options of a step. Before the function, the gradients are clipped and, with a scaler, which
  // then moves as for other steps, unscaled: if one is inf or NaN, the function does not run, and they are dropped.
  void step(std::function<void()> update, const StepOptions& options);

  // Predicts the memory that forward_backward with these arguments would take, without making a step. Each layer runs
  // once with one microbatch, outside of the pipeline. Waits for the calls under way first, and settles no step: later
  // calls have the bits that they would have had.
  template <typename Inputs, typename Labels, typename Loss>
  MemoryPrediction predict_memory(Inputs inputs, Labels labels, Loss loss, const RunOptions& options);
  template <typename Inputs, typename Labels, typename Loss>
  MemoryPrediction predict_memory(Inputs inputs, Labels labels, Loss loss) {
    return predict_memory(std::move(inputs), std::move(labels), std::move(loss), run_options_);
  }

  // The options of calls that are given none; may be changed.
  RunOptions& run_options();
  // The number that kAutoMicrobatches stands for, once the first training call has chosen it; that call says it, with
  // the reason, through tell_user(). A checkpoint restores it, since it belongs to the bits.
  const std::optional<int>& auto_microbatches() const { return auto_microbatches_; }
  // Throws std::invalid_argument for less than 1.
  void set_auto_microbatches(std::optional<int> count);
  const std::string& name() const;
  int layers() const;
  std::optional<Arithmetic> arithmetic() const { return arithmetic_; }

  // The plan of the last call, and of the last one with a backward; empty before it.
  const std::optional<schedule::Plan>& last_plan() const;
  const std::optional<schedule::Plan>& last_step_plan() const;
  // What the calls so far have measured of each layer; estimates before.
  schedule::LayerCosts costs() const;
  // The share of the latest training steps' time in which the devices computed, from 0 to 1; unset until two have been
  // measured. Throws what work that still runs threw.
  std::optional<double> busy_share();
  // When and where the last call ran what, so far.
  std::vector<runtime::ExecutionRecord> last_records() const;
  // How many jobs had the same bits on a second device, see RunOptions::verify_every.
  int64_t verified_jobs() const;

  // Random numbers: before a layer runs on a microbatch of call number `call` (0, 1, ...), its generators are seeded
  // with this value. `layer` = layers() stands for the loss; `backward`: the seed when its gradient arrives.
  uint64_t layer_seed(uint64_t call, int microbatch, int layer, bool backward = false) const;
  // What the seeds depend on: the seed of torch's default generator when the model was made, and the number of calls.
  uint64_t random_seed() const;
  void set_random_seed(uint64_t seed);
  uint64_t calls() const;
  void set_calls(uint64_t calls);

 private:
  friend class LanguageModel;  // cuts its batches itself

  template <typename... Arguments>
  static detail::Batch packed(Arguments... arguments) {
    if constexpr (sizeof...(Arguments) == 1) {
      return detail::batch_of(std::move(arguments)..., /*is_call=*/false);
    } else {
      return detail::batch_of(std::tuple<Arguments...>(std::move(arguments)...), /*is_call=*/true);
    }
  }

  // Throws std::invalid_argument if modules or parameters have changed in a way that the model does not follow.
  void check_modules() const;
  // Throws std::invalid_argument if a fused optimizer is not that of this model.
  void require_own(const char* where, const Optimizer& optimizer) const;
  std::vector<runtime::Values> run(detail::Batch inputs, RunOptions options);
  CallArguments arguments(const char* where, detail::Batch inputs, detail::Batch labels, LossFunction loss,
                          const RunOptions& options);
  // How many microbatches a call makes of the inputs, by the options or by default.
  int count_of(const detail::Batch& inputs, const RunOptions& options) const;
  // The same for training. If the planner is to choose the number and has not, it does, by the calls that `cut` makes.
  int count_to_train(const detail::Batch& inputs, const RunOptions& options,
                     const std::function<CallArguments(int count)>& cut);
  // `own_loss`: has divided the loss, which is the model's own, by what all nodes count; null: the loss is the user's.
  Pending submit_cut(const char* where, detail::Batch inputs, detail::Batch labels, LossFunction loss,
                     RunOptions options, bool keep_outputs, bool refuses_nan_early,
                     std::shared_ptr<CallCount> own_loss = nullptr);
  MemoryPrediction predict(detail::Batch inputs, detail::Batch labels, const LossFunction& loss,
                           const RunOptions& options);
  std::vector<Layer> layers_;
  // The Sequential that the model was made of and its children then; null for layers.
  std::shared_ptr<torch::nn::SequentialImpl> container_;
  std::vector<std::shared_ptr<torch::nn::Module>> children_;
  RunOptions run_options_;
  std::optional<Arithmetic> arithmetic_;
  std::optional<int> auto_microbatches_;
};

// A batch that Model::submit has started. What its loss refers to lives until finish() or Model::synchronize() is over.
// Thread safety: that of its model, which it may outlive.
class Model::Pending {
 public:
  // Waits for the losses, and returns or throws what forward_backward does. Once, and not if this was moved from.
  TrainResult finish();
  // Records of the batch so far.
  std::vector<runtime::ExecutionRecord> records() const;

 private:
  friend class Model;
  Pending(std::shared_ptr<PendingCall> batch, c10::Device output_device, std::shared_ptr<CallCount> own_loss)
      : batch_(std::move(batch)), output_device_(output_device), own_loss_(std::move(own_loss)) {}

  PendingCall& batch() const;
  std::shared_ptr<PendingCall> batch_;  // null: moved from
  c10::Device output_device_;
  std::shared_ptr<CallCount> own_loss_;
};

template <typename Inputs, typename Labels, typename Loss>
TrainResult Model::forward_backward(Inputs inputs, Labels labels, Loss loss, const RunOptions& options,
                                    bool keep_outputs) {
  return submit_cut("forward_backward", detail::batch_of(std::move(inputs), true),
                    detail::batch_of(std::move(labels), false), loss_function<detail::Part<Labels>>(std::move(loss)),
                    options, keep_outputs, /*refuses_nan_early=*/false)
      .finish();
}

template <typename Inputs, typename Labels, typename Loss>
Model::Pending Model::submit(Inputs inputs, Labels labels, Loss loss) {
  return submit(std::move(inputs), std::move(labels), std::move(loss), run_options_);
}

template <typename Inputs, typename Labels, typename Loss>
Model::Pending Model::submit(Inputs inputs, Labels labels, Loss loss, const RunOptions& options, bool keep_outputs) {
  return submit_cut("submit", detail::batch_of(std::move(inputs), true), detail::batch_of(std::move(labels), false),
                    loss_function<detail::Part<Labels>>(std::move(loss)), options, keep_outputs,
                    /*refuses_nan_early=*/true);
}

template <typename Inputs, typename Labels, typename Loss>
MemoryPrediction Model::predict_memory(Inputs inputs, Labels labels, Loss loss, const RunOptions& options) {
  return predict(detail::batch_of(std::move(inputs), true), detail::batch_of(std::move(labels), false),
                 loss_function<detail::Part<Labels>>(std::move(loss)), options);
}

}  // namespace roundpipe
