#include <roundpipe/api/joint_steps.h>

#include <exception>
#include <utility>

#include <torch/version.h>

#include <roundpipe/cluster/nodes.h>
#include <roundpipe/core/frontend.h>
#include <roundpipe/core/number_text.h>
#include <roundpipe/optim/option_names.h>
#include <roundpipe/training/fused_steps.h>
#include <roundpipe/training/joint_training.h>

namespace roundpipe {

std::shared_ptr<JointTraining> agree_on_start(const JointModels& models, const FusedRule& rule,
                                              std::vector<std::vector<at::Tensor>> groups,
                                              const std::shared_ptr<cluster::Nodes>& nodes,
                                              std::shared_ptr<JointTraining> before) {
  std::shared_ptr<JointTraining> joint = before;
  if (!before) {
    joint = std::make_shared<JointTraining>(std::make_shared<cluster::Agreement>(nodes->control(), models.name),
                                            ModelTraits{ROUNDPIPE_VERSION, TORCH_VERSION, models.name, models.layers});
  }
  OptimizerTraits traits{optim::option_names(rule.algorithm).class_name, {}, std::move(groups), {}};
  for (const optim::Hyperparameters& options : rule.groups) traits.options.push_back(describe(rule.algorithm, options));
  traits.format = {{"moments", rule.format.moments == optim::MomentFormat::kFloat32 ? "float32" : "8bit"},
                   {"masters", rule.format.masters == optim::MasterFormat::kFloat32 ? "float32" : "24bit"},
                   {"gradients_in_fp32", rule.gradients_in_fp32 ? "true" : "false"},
                   {"gradients_at_once", rule.gradients_at_once ? "true" : "false"}};
  joint->agree_on_start(traits, models.parameters, before ? cluster::NamedTensors() : models.buffers);
  return joint;
}

StepOptions agree_on_step(const FusedSteps& steps, optim::Algorithm algorithm,
                          const std::vector<optim::Hyperparameters>& groups, const StepOptions& options,
                          double loss_scale) {
  if (!steps.joint()) return options;
  const auto number = [](std::optional<double> given) { return given ? number_text(*given) : "none"; };
  std::vector<cluster::Told> told;
  for (const optim::Hyperparameters& group : groups) told.push_back(describe(algorithm, group));
  const double factor = steps.joint()->step({{"asynchronous", options.asynchronous ? "true" : "false"},
                                             {"max_grad_norm", number(options.max_grad_norm)},
                                             {"clip_by", name_of(options.clip_by)},
                                             {"gradient_factor", number(options.gradient_factor)},
                                             {"the loss scale", number(loss_scale)}},
                                            told, !steps.hides_weights());
  StepOptions agreed = options;
  if (!agreed.gradient_factor) agreed.gradient_factor = factor;
  return agreed;
}

void telling_failure(const FusedSteps& steps, const std::function<void()>& work) {
  try {
    work();
  } catch (const std::exception& error) {
    if (steps.joint() && !frontend().is_interrupt(std::current_exception()))
      steps.joint()->counts()->tell_failure(frontend().said(error));
    throw;
  }
}

}  // namespace roundpipe
