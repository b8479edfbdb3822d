#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <roundpipe/runtime/model_optimizer.h>
#include <roundpipe/training/model_core.h>
#include <roundpipe/training/trained_parameters.h>

namespace roundpipe {

class JointTraining;

// A fused optimizer, as it is made for models.
struct FusedRule {
  optim::Algorithm algorithm = optim::Algorithm::kAdamW;
  std::vector<optim::Hyperparameters> groups;
  optim::StateFormat format = {};
  bool gradients_in_fp32 = false;  // those of 16-bit weights, on the host
  DiskOptions disk = {};
  bool gradients_at_once = false;  // each is used, and its memory free, as it lands; see Pipeline::bound_gradients
};

// Steps of one or more models by a fused optimizer, which updates each block in place as soon as its gradient has
// landed. There are no copies of parameters. Parameters that the program itself uses, outside of the models, are
// stepped with them: their gradients are in their `.grad`.
//
// From a step until show_weights() or synchronize(), parameters may show neither the old nor the new weights.
// Thread safety: the caller's thread.
class FusedSteps {
 public:
  using Models = std::vector<std::shared_ptr<ModelCore>>;
  using HostParameters = std::vector<memory::NamedTensor>;
  // The group of each trained parameter; negative: it is not trained.
  using GroupOf = std::function<int(const at::Tensor& parameter)>;

  // Host parameters are stepped once each, by the first of their names.
  FusedSteps(Models models, const HostParameters& host_parameters);

  // Throws BudgetExceeded, in the name of `where`, if a model's budget of the host has no room for them all with this
  // optimizer, whose state so many `nodes` share; `name`: what is said not to fit.
  void require_room(const char* where, const std::string& name, const FusedRule& rule, const GroupOf& group_of,
                    int nodes) const;
  // Refuses, as bind() would, what the environment says of updates. Then waits for all work of the models.
  void prepare_bind();
  // Makes the optimizer, which replaces an earlier one; fp32 masters stay. `named`: every parameter under every name.
  // `joint`: what the nodes have agreed on; null: there is one node, or the caller keeps it.
  // Throws std::invalid_argument, before anything is made, for a parameter that its group's rule or format
  // cannot step.
  // REQUIRES: prepare_bind().
  void bind(const FusedRule& rule, TrainedParameters::Named named, const GroupOf& group_of,
            std::shared_ptr<cluster::Nodes> nodes, std::shared_ptr<JointTraining> joint = nullptr);
  // Whether these are its models and host parameters.
  bool are(const Models& models, const HostParameters& host_parameters) const;
  // Null: bind() was not called.
  const std::shared_ptr<runtime::ModelOptimizer>& optimizer() const { return optimizer_; }

  // The models' pipelines, then that of the host parameters if there are some, since bind().
  const std::vector<std::shared_ptr<runtime::Pipeline>>& pipelines() const { return pipelines_; }
  // Null: there are no host parameters, or bind() was not called.
  const std::shared_ptr<runtime::Pipeline>& host_pipeline() const { return host_; }
  // See TrainedParameters::late.
  std::optional<std::string> late_parameter() const { return trained_.late(); }

  // A step, in two parts. First, throws what earlier steps and calls threw, and waits until a step can be started; what
  // calls throw later, with several nodes, start_step() tells the others. `asynchronous`: whether the next call reads
  // the weights from before this step.
  void prepare_step(bool asynchronous);
  // Starts it. REQUIRES: prepare_step(); no call since.
  std::shared_ptr<runtime::StepRun> start_step(std::vector<optim::Hyperparameters> groups, const StepOptions& options,
                                               double loss_scale);

  // See ModelOptimizer::measure_gradients.
  double measure_gradients();

  // Waits for all work; then calls read the newest weights, which the parameters show with the gradients that no step
  // has consumed.
  void synchronize();
  // Whether a step was made since synchronize().
  bool is_behind() const { return is_behind_; }
  // Lets the parameters show the newest weights; calls read what they would have read.
  void show_weights();
  // As it was given to bind().
  const std::shared_ptr<JointTraining>& joint() const { return joint_; }
  // Whether parameters may not show the weights from which the next step starts.
  bool hides_weights() const { return hides_weights_; }
  // Lets what the program computes on the host read the weights that calls read.
  void show_host_weights();
  // Drops the gradients that no step has consumed, without waiting.
  void drop_gradients();

 private:
  const Models models_;
  const HostParameters host_parameters_;
  std::vector<std::shared_ptr<runtime::Pipeline>> pipelines_;
  std::shared_ptr<runtime::Pipeline> host_;
  std::shared_ptr<runtime::ModelOptimizer> optimizer_;
  TrainedParameters trained_;
  std::shared_ptr<JointTraining> joint_;
  bool hides_weights_ = false;
  bool is_behind_ = false;
};

// The smallest limit of a model on the host; unset: none has one.
std::optional<int64_t> host_budget(const FusedSteps::Models& models);

}  // namespace roundpipe
