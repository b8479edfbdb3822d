#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/api/layer_instance.h>
#include <roundpipe/runtime/step/step_options.h>

namespace roundpipe::cluster {
class Nodes;
}
namespace roundpipe::runtime {
class ModelOptimizer;
class Pipeline;
}  // namespace roundpipe::runtime

namespace roundpipe {

class CopySteps;
class FusedSteps;
class LossCounts;
class ModelCore;
struct FusedRule;

class HostWeights;

// What one optimizer steps together, see ModelGroup.
struct SteppedWeights {
  std::vector<std::pair<std::string, HostWeights*>> models;
  NamedParameters parameters = {};
};

// Adds tensors of a model under the names that they have in a whole; `path`: of the model there, empty if it is all.
void add_named(NamedParameters& all, const std::string& path, const NamedParameters& named);

// A model's weights on the host, and who updates them: a fused optimizer that was made for the model or, until there is
// one, code that changes the parameters themselves, such as torch::optim. The base of Model.
// Of an object that was moved from, every function but assignment throws std::invalid_argument.
// Thread safety: the caller's thread.
class HostWeights {
 public:
  // `named`: every parameter under every name, layer by layer; `buffers` in the same way.
  HostWeights(std::shared_ptr<ModelCore> core, NamedParameters named, NamedParameters buffers);
  HostWeights(HostWeights&&) = default;
  HostWeights& operator=(HostWeights&& other) noexcept;
  // Waits for steps of a fused optimizer, so that the user's modules are left with the newest weights.
  virtual ~HostWeights();

  // Waits for all work. Then the parameters show the newest weights, the buffers are those after the last forward, and
  // `.grad` holds the gradients that no step has consumed. Settles an asynchronous step: the next call reads its
  // weights at once, and not one call later. docs/training-loop.md lists what else does. Throws whatever the work
  // threw.
  void synchronize();

  // The user's own parameters, under every name: layer, then name in the layer ("0.weight"). Shows the weights that
  // calls read now; waits for them, and for nothing else. Settles no step.
  const NamedParameters& named_parameters();

  // Drops the gradients that no step has consumed, without waiting; with optimizer_parameters(), waits for all work.
  void zero_grad();

  // The parameters for an optimizer that a function of Model::step runs: copies of those that require grad now, on the
  // host, with their names. `dtype`: of the copies; unset: each parameter's own. The first call makes them; then the
  // model is stepped by functions alone. Their gradients are there inside such a function. Throws std::invalid_argument
  // if there are none, if a fused optimizer was made for the model, or for another dtype than before.
  const NamedParameters& optimizer_parameters(std::optional<c10::ScalarType> dtype = std::nullopt);

  // The group of each trainable parameter, by its name; called once for each.
  using GroupOf = std::function<int(const std::string& name, const at::Tensor& parameter)>;
  // Makes a fused optimizer for the parameters that require grad; it replaces an earlier one. `accepted` is called when
  // every parameter has its group, and may throw to leave everything as it was. Waits for all work. Collective with
  // `nodes`: throws std::invalid_argument on each of them if they have other models, weights or optimizers; then
  // nothing has been changed.
  static std::shared_ptr<FusedSteps> bind(const SteppedWeights& stepped, const GroupOf& group_of,
                                          const std::function<void()>& accepted, const FusedRule& rule,
                                          std::shared_ptr<cluster::Nodes> nodes);
  // Throws std::invalid_argument for a parameter that has become trainable, so that nothing would update it.
  static void refuse_late(const std::optional<std::string>& parameter);

  // -- for checkpoints: what there is, without a look at values --
  ModelCore& core() const { return *shared_core(); }
  const std::shared_ptr<ModelCore>& shared_core() const;
  const std::shared_ptr<runtime::Pipeline>& shared_pipeline() const;
  // Null: none was made.
  std::shared_ptr<runtime::ModelOptimizer> fused_optimizer() const;
  const std::shared_ptr<FusedSteps>& fused_steps() const;
  // What the calls since the last step have used as their losses, with several nodes; null: there is one.
  std::shared_ptr<LossCounts> loss_counts() const;
  // Null: there are no optimizer_parameters().
  const std::shared_ptr<CopySteps>& copy_steps() const;
  const NamedParameters& parameter_names() const;
  const NamedParameters& buffer_names() const;

 protected:
  runtime::Pipeline& pipeline() const;
  // Throws std::invalid_argument if a parameter has become trainable that the fused optimizer does not train.
  void check_trainable() const;
  // Throws std::invalid_argument if a fused optimizer or functions update the model.
  void require_plain(const char* where) const;
  // Lets calls read what the program has written into the optimizer's parameters, and the program what calls read.
  void publish_written();
  // See Model::step.
  void step_by(std::function<void()> update, const StepOptions& options);

 private:
  void leave_weights() noexcept;

  std::shared_ptr<ModelCore> core_;  // null: moved from
  NamedParameters named_;
  NamedParameters buffers_;
  std::shared_ptr<FusedSteps> fused_;     // null: no fused optimizer was made; models of a group share it
  std::shared_ptr<CopySteps> copies_;     // null: none were made
  NamedParameters optimizer_parameters_;  // those
  std::optional<c10::ScalarType> copies_dtype_;
  bool is_behind_ = false;  // a function's step has begun, so parameters may not show the newest values
};

}  // namespace roundpipe
