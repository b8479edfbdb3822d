#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <roundpipe/cluster/shared_values.h>
#include <roundpipe/optim/algorithm.h>
#include <roundpipe/runtime/step/step_options.h>

namespace roundpipe::cluster {
class Nodes;
}

namespace roundpipe {

class FusedSteps;
class JointTraining;
struct FusedRule;

// What the nodes that train one model, or one group of them, agree on. Collective; without other nodes, nothing
// happens.

// What is stepped.
struct JointModels {
  std::string name;
  int layers = 0;
  const cluster::NamedTensors& parameters;  // all of them
  const cluster::NamedTensors& buffers;
};
// Agrees on the models and on an optimizer that is about to be made for them. `before`: on which nodes have agreed for
// the same models; null: on nothing. `groups`: the parameters of each. Throws std::invalid_argument on each node if
// something differs.
std::shared_ptr<JointTraining> agree_on_start(const JointModels& models, const FusedRule& rule,
                                              std::vector<std::vector<at::Tensor>> groups,
                                              const std::shared_ptr<cluster::Nodes>& nodes,
                                              std::shared_ptr<JointTraining> before);

// Agrees on a step, and returns its options with the factor of the gradients. Throws as JointTraining::step does.
StepOptions agree_on_step(const FusedSteps& steps, optim::Algorithm algorithm,
                          const std::vector<optim::Hyperparameters>& groups, const StepOptions& options,
                          double loss_scale);

// Runs what comes before that, and tells the other nodes of an error in it: they then make no step either.
void telling_failure(const FusedSteps& steps, const std::function<void()>& work);

}  // namespace roundpipe
